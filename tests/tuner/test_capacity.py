"""How many processes compile, and that a slow compile holds nothing up."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import slow_compiler
from tuner_fakes import FAMILY, GPU, FakeBench, FakeBuilder, problem, run

from flashtune.codegen.compiler.render import Source
from flashtune.codegen.families.registry import source_for
from flashtune.tuner.processes import capacity, compile_pool
from flashtune.tuner.processes.compile_pool import (
    MAX_WORKERS,
    WORKER_BYTES,
    Built,
    ProcessBuilder,
    pool_size,
    spare_workers,
)
from flashtune.tuner.search.space import make_space

GB = 10**9


@pytest.mark.parametrize(
    ("cores", "memory", "workers"),
    [
        (1, 64 * GB, 1),
        (8, 64 * GB, 8),
        (128, 64 * GB, MAX_WORKERS),
        (128, None, MAX_WORKERS),
        (8, 3 * WORKER_BYTES, 3),
        (8, WORKER_BYTES + 1, 1),
        (8, 0, 1),
    ],
)
def test_processes_are_capped_by_cores_and_free_memory(cores: int, memory: int | None, workers: int) -> None:
    assert pool_size(cores, memory) == workers


@pytest.mark.parametrize(
    ("available", "devices", "workers"), [(16, 0, 16), (16, 4, 12), (2, 1, 2), (1, 1, 2), (4, 8, 2)]
)
def test_each_device_has_a_core_and_a_slow_compile_another_process_beside_it(
    monkeypatch: pytest.MonkeyPatch, available: int, devices: int, workers: int
) -> None:
    monkeypatch.setattr(compile_pool, "cores", lambda: available)
    assert spare_workers(devices) == workers


def test_a_builder_looks_at_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "free_memory", lambda: 5 * WORKER_BYTES)
    builder = ProcessBuilder("sm_90a", 64)
    builder.close()
    assert builder.workers == 5


FILES = {
    "proc/meminfo": "MemTotal:       65536 kB\nMemFree:         1024 kB\nMemAvailable:   32768 kB\n",
    "sys/fs/cgroup/memory.max": "20000000\n",
    "sys/fs/cgroup/memory.current": "5000000\n",
}


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({}, 15_000_000),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 32768 * 1024),
        ({"sys/fs/cgroup/memory.current": "30000000\n"}, 0),
        ({"sys/fs/cgroup/memory.max": None}, 32768 * 1024),
        (dict.fromkeys(FILES), None),
        (
            {
                "sys/fs/cgroup/memory.max": None,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
            },
            8_000_000,
        ),
    ],
    ids=["container", "no-limit", "used-up", "no-container", "unknown", "version-1"],
)
def test_free_memory_is_what_system_and_container_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], free: int | None
) -> None:
    for name, text in {**FILES, **changes}.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(capacity, "ROOT", tmp_path)
    assert capacity.free_memory() == free


def test_a_slow_compile_holds_up_no_other_even_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "build", slow_compiler.build)
    monkeypatch.setattr(compile_pool, "free_memory", lambda: None)
    monkeypatch.setattr(compile_pool, "cores", lambda: 1)
    builder = ProcessBuilder("sm_90a", spare_workers(1))
    try:
        slow = builder.submit(Source("600", "int slow;"))
        others = [builder.submit(Source("0.01", f"int other{number};")) for number in range(20)]
        assert [each.result(60).digest for each in others] == [
            Source("", f"int other{number};").digest for number in range(20)
        ]
        assert not slow.done()
        started = time.monotonic()
    finally:
        builder.close()
    assert time.monotonic() - started < 60, "nor the end of a run: it takes 600 s"


def test_a_config_that_compiles_for_ever_leaves_the_device_to_the_others(tmp_path: Path) -> None:
    """It is measured when it is done, at the end of the run here."""
    slow = make_space(problem(), GPU, FAMILY).configs[1]
    bench = FakeBench()

    class Slow(FakeBuilder):
        job: Future[Built] = Future()

        def submit(self, source: Source) -> Future[Built]:
            done = super().submit(source)
            if source.digest != source_for(problem(), slow).digest:
                return done
            if len(bench.attempts) >= 29 and not self.job.done():
                self.job.set_result(done.result())
            return self.job

    builder = Slow()

    def progress(_: object) -> None:
        if builder.submitted[source_for(problem(), slow).digest]:
            builder.submit(source_for(problem(), slow))

    report = run(tmp_path / "tuned.db", [problem()], 30, bench=bench, builder=builder, progress=progress)
    assert report.tried == 30
    asked = [config for _, config in bench.attempts]
    assert asked.index(slow) == 29
