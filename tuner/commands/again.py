"""Configs that are known are tried again here: a tuning run that searches nothing, for `verify.py` and `recheck.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flashtune import settings
from flashtune.codegen.families.model import predict
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.errors import InvalidInput, NoGpu, StoreError
from flashtune.files import shown_path
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Builder, ProcessBuilder, spare_workers
from flashtune.tuner.processes.process import RunEndedError, interrupts_held
from flashtune.tuner.results.budget import Budget, Meter
from flashtune.tuner.results.report import Progress
from flashtune.tuner.run.coordinator import Coordinator
from flashtune.tuner.run.deal import deal, trial_seconds
from flashtune.tuner.run.device_queue import DeviceQueue
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.tune.measured_run import leave_alone
from flashtune.tuner.tune.session import locate
from flashtune.tuner.workers.process_worker import ProcessWorker, Unit, Worker
from flashtune.tuner.workers.supervisor import Supervisor
from flashtune.values import shown

MESSAGE = 200
"""Characters of the message of a failure; the row has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run was. ``session`` is its id in the database."""

    session: str
    seconds: float
    interrupted: bool
    stopped: str
    """Why it ended early, other than by Ctrl-C; empty if it did not."""
    note: str

    @property
    def ended(self) -> str:
        """Why it ended early."""
        return self.stopped or ("interrupted" if self.interrupted else "")


@dataclass(frozen=True, slots=True)
class AtHand:
    """The GPU at hand and the database."""

    gpu: Gpu
    units: Sequence[Unit]
    path: Path

    @contextmanager
    def opened(self) -> Iterator[tuple[Store, Builder]]:
        """For a run."""
        with Store.open(self.path, create=False) as store:
            builder = ProcessBuilder(self.gpu.arch, spare_workers(len(self.units)))
            try:
                yield store, builder
            finally:
                builder.close()


def at_hand(
    gpu: Gpu | str | None, devices: Sequence[int] | None, database: str | Path | None, *, sample: int, seed: int
) -> AtHand:
    """Where to run, before anything is changed. Raises `NoGpu`, `InvalidInput` and `StoreError`."""
    _check_number("sample", sample, 1)
    _check_number("seed", seed, 0)
    if gpu is None and devices is None:
        gpu = require_device()
    search, units, reason = locate(gpu, "auto", devices)
    if not units:
        raise NoGpu(f"{reason}. Claims are verified on the GPU that they are for; nothing was changed")
    settings.author()  # a name that can't be stored would fail with the first row
    path = Path(settings.database_path() if database is None else database)
    if not path.exists():
        raise StoreError(f"there is no tuning database at {shown_path(path)}")
    return AtHand(search, units, path)


def try_again(
    searches: Sequence[ProblemSearch],
    gpu: Gpu,
    store: Store,
    units: Sequence[Unit],
    builder: Builder,
    seed: int,
    progress: Callable[[Progress], None],
    clock: Callable[[], float] = time.monotonic,
    hire: Callable[[Unit], Worker] = ProcessWorker,
) -> Ran:
    """Tries the given configs of ``searches``, each of another problem, on ``units``, each of which is a ``gpu``, into
    ``store``.

    Ends early, with what is known, on Ctrl-C, or when no device can have a worker any more.
    """
    meter = Meter(Budget(trials=sum(len(each.given) for each in searches)), clock)
    run = Coordinator(gpu, store, builder, meter, seed, progress)
    supervisors: list[Supervisor] = []
    interrupted, stopped = False, ""
    try:
        for unit in units[: len(searches)]:
            with interrupts_held():
                supervisors.append(Supervisor(unit, hire))
        for each in searches:
            leave_alone(each, each.given, run.recorder.blocklist)
            for source in units[0].sources(each.problem):
                builder.submit(source)
        costs = [trial_seconds(predict(each.problem, each.default, gpu).seconds) for each in searches]
        hands = deal(costs, len(supervisors))
        queues = [
            DeviceQueue(supervisor, [searches[at] for at in hand])
            for supervisor, hand in zip(supervisors, hands, strict=True)
        ]
        with store.snapshot():  # keeps a connection open, as a tuning run does
            run.run(queues)
    except KeyboardInterrupt:
        interrupted = True
    except RunEndedError as error:
        stopped = str(error)
    finally:
        try:
            run.finish()
        finally:
            for supervisor in supervisors:
                supervisor.end()
    notes = dict.fromkeys(filter(None, [*run.lost, *(supervisor.evidence.note for supervisor in supervisors)]))
    return Ran(
        session=run.recorder.session,
        seconds=meter.elapsed,
        interrupted=interrupted,
        stopped=stopped,
        note="" if stopped else "; ".join(notes),
    )


def failure_text(row: Measurement) -> str:
    """What a failure says, in one line."""
    message = " ".join(row.message.split())  # a compiler's has lines
    return f"{row.status}: {message[:MESSAGE]}" if message else row.status


def _check_number(name: str, got: object, least: int) -> None:
    if isinstance(got, bool) or not isinstance(got, int) or not least <= got < 2**32:
        raise InvalidInput(f"{name}={shown(got)} must be a whole number from {least} to 2**32 - 1")
