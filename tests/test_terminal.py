"""The terminal that tests have: it hides nothing, and what is typed there reaches the program."""

from __future__ import annotations

import sys

import pytest
from terminal import CTRL_C, flashtune_on_terminal, on_terminal


def printed(text: str, **options: object) -> tuple[str, list[str]]:
    shown = on_terminal([sys.executable, "-c", f"print({text!r})"], **options)  # type: ignore[arg-type]
    assert shown.code == 0
    return shown.text, shown.controls


@pytest.mark.parametrize(
    "stray",
    ["\x1b]0;title\x07", "\x1b[2J", "\x1b[31m", "\x9b31m", "\x1bc", "\b", "\x00", "\x7f", "\r", "\u202e", "\u2066"],
    ids=repr,
)
def test_no_control_character_goes_unseen(stray: str) -> None:
    assert printed("before" + stray + "after")[1] != []


def test_text_bold_and_the_ends_of_lines_are_no_controls() -> None:
    assert printed("\x1b[1mbold\x1b[0m, plain, \xe4 \u65e5\nand more") == ("bold, plain, \xe4 \u65e5\nand more\n", [])


def test_a_program_sees_a_terminal_of_the_given_size() -> None:
    ask = "import os; print(*os.get_terminal_size(), *map(os.isatty, range(3)))"
    shown = on_terminal([sys.executable, "-c", ask], columns=77, lines=21)
    assert shown.text == "77 21 True True True\n"


def test_what_is_typed_arrives_and_ctrl_c_interrupts() -> None:
    wait = "import time; print(input('name? ')); print('ready', flush=True); [time.sleep(0.05) for _ in iter(int, 1)]"
    shown = on_terminal([sys.executable, "-c", wait], keys=[(b"name? ", b"me\n"), (b"ready", CTRL_C)])
    assert "KeyboardInterrupt" in shown.text
    assert shown.code == -2


def test_a_program_that_goes_on_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="it has not ended"):
        on_terminal([sys.executable, "-c", "import signal; signal.pause()"], seconds=0.5)


def test_the_command_line_is_that_of_the_checkout() -> None:
    shown = flashtune_on_terminal("--help")
    assert shown.code == 0
    assert "flashtune explain" in shown.text
    assert shown.controls == []
