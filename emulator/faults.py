"""What the runtime reports, made readable: program counters become lines of templates."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from .program import Program

MARK = "emulator fault"
_PLACE = re.compile(r"((?:templates|emulator)/[\w./]+):(\d+)")
_COUNTER = re.compile(r"@([0-9a-f]+)@")


@dataclass(frozen=True, slots=True)
class Fault:
    """Where a kernel did what it must not: ``places`` are template lines, the innermost first."""

    block: int
    thread: int
    places: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        warp, lane = divmod(self.thread, 32)
        at = "".join(f"\n  at {place}" for place in self.places)
        return f"block {self.block}, thread {self.thread} (warp {warp}, lane {lane}): {self.text}{at}"


def read_fault(output: str, program: Program) -> Fault | None:
    """The first report in what the runtime of ``program`` wrote, if there is one."""
    _, found, rest = output.partition(f"{MARK}\n")
    if not found:
        return None
    block = thread = 0
    counters: list[str] = []
    text = ""
    for line in rest.splitlines():
        kind, _, value = line.partition(" ")
        if kind == "block":
            block = int(value)
        elif kind == "thread":
            thread = int(value)
        elif kind == "pc":
            counters.append(value)
        elif kind == "text":
            text = value
            break
    others = _COUNTER.findall(text)
    lines = _places([*counters, *others], program)
    chain = [place for counter in counters for place in lines.get(counter, ()) if place.startswith("templates/")]
    for other in others:
        known = [place for place in lines.get(other, ()) if place.startswith("templates/")]
        text = text.replace(f"@{other}@", known[0] if known else "a place that is not known", 1)
    return Fault(block, thread, tuple(dict.fromkeys(chain)), text)


def _places(counters: Sequence[str], program: Program) -> dict[str, list[str]]:
    """``file:line`` of each program counter with the functions it was inlined into, the innermost first."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None or not counters:
        return {}
    done = program.run([tool, "-a", "-i", "-e", program.path, *counters], timeout=60)
    places: dict[str, list[str]] = {}
    current: list[str] = []
    for line in done.stdout.splitlines():
        if line.startswith("0x"):
            current = places.setdefault(f"{int(line, 16):x}", [])
        elif (match := _PLACE.search(line)) is not None:
            current.append(f"{match[1]}:{match[2]}")
    return places
