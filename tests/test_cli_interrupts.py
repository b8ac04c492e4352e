"""Ctrl-C ends a command with exit code 130 and at most one line, at any moment of its life."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import run as call
from terminal import CTRL_C, SOURCES, flashtune_on_terminal, on_terminal

LIST = ["list", "--db", str(Path(__file__).parent / "upgrade_assets" / "v0001.db")]
QUIET = ("", "Interrupted.\n")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    paths = [str(SOURCES), str(Path(__file__).parent), str(Path(__file__).parent / "tuner")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "FLASHTUNE_DB": str(tmp_path / "tuned.db"),
        "FLASHTUNE_CACHE_DIR": str(tmp_path / "cache"),
    }


Interrupted = Callable[[list[str], str, int], Iterator[tuple[int, int]]]


@pytest.fixture
def interrupted(tmp_path: Path, environment: dict[str, str]) -> Interrupted:
    """Runs a command again and again, each time with SIGINT at another import; the step and the exit code of each."""

    def interrupted(words: list[str], how: str, stride: int) -> Iterator[tuple[int, int]]:
        script = str(Path(__file__).parent / "interrupted_imports.py")
        with subprocess.Popen(
            [sys.executable, script, how, str(tmp_path), *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            for step in range(1, 10_000, stride):
                process.stdin.write(f"{step}\n")
                process.stdin.flush()
                code, met = process.stdout.readline().split()
                if met == "False":
                    break
                yield step, int(code)
            process.stdin.close()

    return interrupted


@pytest.mark.parametrize(
    ("words", "stride", "how"), [(["--version"], 19, "module"), (LIST, 83, "program")], ids=["version", "list"]
)
def test_an_interrupt_at_an_import_is_no_traceback(
    interrupted: Interrupted, tmp_path: Path, words: list[str], stride: int, how: str
) -> None:
    """m4."""
    check_each(interrupted(words, how, stride), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "stride"), [(["--version"], 2), (LIST, 11)], ids=["version", "list"])
def test_an_interrupt_at_any_import_is_no_traceback(
    interrupted: Interrupted, tmp_path: Path, words: list[str], stride: int
) -> None:
    """m4, at every second step or so: a list has five hundred."""
    check_each(interrupted(words, "module", stride), tmp_path)


def check_each(ends: Iterator[tuple[int, int]], folder: Path) -> None:
    count = 0
    for step, code in ends:
        told = (folder / "err").read_text()
        assert (code, told) in [(130, each) for each in QUIET], f"import {step}: {told}"
        count += 1
    assert count > 5, "it has no imports to be interrupted at"


@pytest.mark.parametrize("how", ["runpy.run_module('flashtune', run_name='__main__')", "import flashtune.__main__"])
def test_an_interrupt_at_the_first_imports_of_all_is_silent(environment: dict[str, str], how: str) -> None:
    """m4: before the first module can do anything but be imported. In an exec() of text it would be remembered."""
    program = (
        "import runpy, sys\nimport importlib.util, flashtune\n"
        "class Interrupt:\n    def find_spec(self, name, *_):\n"
        "        if name == 'signal':\n            exec('raise KeyboardInterrupt')\n"
        f"sys.modules.pop('signal', None)\nsys.meta_path.insert(0, Interrupt())\n{how}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


ANNOUNCE = """
import os, sys
def told(event, arguments):
    if event == "import" and arguments[0] == "flashtune.cli.main" and (fd := os.environ.pop("ANNOUNCE", "")):
        os.write(int(fd), b"x")
sys.addaudithook(told)
"""
"""Tells when flashtune's first module has begun: what Python does before that is not ours."""


@pytest.mark.slow
def test_a_signal_at_any_moment_is_no_traceback(tmp_path: Path, environment: dict[str, str]) -> None:
    """m4, with real signals at random moments."""
    (tmp_path / "sitecustomize.py").write_text(ANNOUNCE)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    moments = random.Random(4)
    codes = set()
    for _ in range(60):
        reader, writer = os.pipe()
        with subprocess.Popen(
            [sys.executable, "-m", "flashtune", *LIST], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**environment, "ANNOUNCE": str(writer)}, pass_fds=[writer],
        ) as process:  # fmt: skip
            os.close(writer)
            assert os.read(reader, 1) == b"x"
            os.close(reader)
            time.sleep(moments.uniform(0, 0.6))
            process.send_signal(signal.SIGINT)
            _, told = process.communicate()
        assert told in QUIET or "rows can't be read" in told, told
        assert process.returncode in (0, 130)
        codes.add(process.returncode)
    assert 130 in codes


def test_where_interrupts_are_ignored_they_stay_so(environment: dict[str, str]) -> None:
    """As behind nohup, or for what a script runs in the background."""
    script = 'trap "" INT; exec "$@"'
    program = (
        "import signal, sys\nfrom flashtune import __main__\nfrom flashtune.cli import main as cli\n"
        "cli.main = lambda **_: (signal.raise_signal(signal.SIGINT), print('went on'))\n__main__.main()"
    )
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("went on\n", "", 0)


def test_an_interrupt_that_python_can_not_pass_on_comes_again(environment: dict[str, str]) -> None:
    """One that arrives in a destructor, or in the callback of a weak reference, which imports have."""
    program = (
        "import signal, sys, time\nfrom flashtune import __main__\nfrom flashtune.cli import show\n"
        "class Late:\n    def __del__(self):\n        signal.raise_signal(signal.SIGINT)\n"
        "def wait(*_):\n    Late()\n    print('went on', flush=True)\n    time.sleep(600)\n"
        "show.show_info = wait\nsys.argv = ['flashtune', 'info']\n__main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert (done.stdout, done.stderr, done.returncode) == ("went on\n", "Interrupted.\n", 130)


def test_an_interrupt_after_the_end_changes_nothing(environment: dict[str, str]) -> None:
    """One that arrives while Python takes its modules down: without handlers it would kill the process."""
    program = (
        "import os, signal, sys\nfrom flashtune import __main__\nfrom flashtune.cli import show\n"
        "class Late:\n    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):\n"
        "        kill(pid, number)\n"
        "late = Late()\nshow.show_info = lambda *_: print('done')\nsys.argv = ['flashtune', 'info']\n"
        "__main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_an_interrupt_while_options_are_read_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("flashtune.cli.show.own_version", interrupt)
    assert call("--version", code=130).output == "Interrupted.\n"


UNCOMPILED = """
import time
from tuner_fakes import FakeBuilder
from flashtune import __main__
from flashtune.tuner.tune import session

class Slow(FakeBuilder):
    def submit(self, source):
        if len(self.submitted) == 3:
            print("three are compiled", flush=True)
            while True:  # a signal just before signal.pause() would not end that
                time.sleep(0.05)
        return super().submit(source)

session.ProcessBuilder = lambda arch, workers: Slow()
__main__.main()
"""


def test_ctrl_c_on_a_terminal_ends_the_view_and_keeps_what_was_found(environment: dict[str, str]) -> None:
    """On a terminal it goes to all processes that have it, and the view must give the cursor back."""
    words = "tune --gpu a100 --mode predict --seqlen 256 --heads 4 --head-dim 64 --budget 9 --family sm80_fwd"
    shown = on_terminal(
        [sys.executable, "-c", UNCOMPILED, *words.split()],
        environment=environment,
        keys=[(b"three are compiled", CTRL_C)],
    )
    assert shown.code == 130
    assert "Traceback" not in shown.text
    assert "Interrupted: all results up to here are stored." in shown.text
    assert "3 configs compiled" in shown.text
    assert shown.raw.rindex(b"\x1b[?25h") > shown.raw.rindex(b"\x1b[?25l")


def test_ctrl_c_on_a_terminal_ends_a_command_that_waits(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nfrom flashtune.codegen.gpu import devices as device\n"
        "device.visible_gpus = lambda: (print('waiting', flush=True), [time.sleep(0.05) for _ in iter(int, 1)])\n"
    )
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    shown = flashtune_on_terminal("info", environment=environment, keys=[(b"waiting", CTRL_C)])
    assert shown.code == 130
    assert shown.text.endswith("Interrupted.\n")
    assert "Traceback" not in shown.text
