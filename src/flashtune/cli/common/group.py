"""How the command line ends, whatever happens in it: exit codes, and one line for each error."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from flashtune.errors import FlashtuneError
from flashtune.files import shown_path

from .output import OutputError, safe_output

FAILED, INTERRUPTED = 1, 130
"""Exit codes besides 0, and 2 for misuse, which is click's. After Ctrl-C it is what shells have for it."""


class Commands(click.Group):
    """Commands whose output is safe, and whose errors, Ctrl-C included, are a line and an exit code."""

    def main(self, *arguments: Any, standalone_mode: bool = True, **options: Any) -> Any:
        command = partial(super().main, *arguments, standalone_mode=False, **options)
        if not standalone_mode:
            return command()
        with safe_output():
            sys.exit(_exit_code(command))

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _before_click():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _before_click():
            return super().invoke(ctx)


@contextmanager
def _before_click() -> Iterator[None]:
    """Takes what click would end in its own way: an interrupt with an empty line, the end of a file as if it were one,
    and any broken pipe without a word, as if it were that of the output."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.Abort from None
    except EOFError as error:
        raise click.ClickException(str(error) or "a file ended too early") from error
    except OutputError:
        raise
    except OSError as error:
        raise click.ClickException(in_words(error)) from error


def _exit_code(command: Callable[[], Any]) -> int:
    try:
        try:
            code = command()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        return code or 0
    except (KeyboardInterrupt, click.Abort):
        # One that arrived in an exec() of text, as imports do for dataclasses, is remembered under python -m, which
        # then ends by the signal and not by the exit code. The next exec() makes it forget.
        exec("")
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except FlashtuneError as error:
        return _told(str(error))
    except MemoryError:
        return _told("there is not enough memory")
    except OSError as error:
        return FAILED if is_unread(error) else _told(in_words(error))


def is_unread(error: OSError) -> bool:
    """Whether the reader of the output has seen enough: that needs no word."""
    return isinstance(error, OutputError) and error.errno == errno.EPIPE


def in_words(error: OSError) -> str:
    """What went wrong, and with which file if it has one: not all that fails in the system is about a file."""
    what, name = error.strerror or str(error), error.filename
    if name is None:
        return what
    return f"{what}: {shown_path(name) if isinstance(name, str | bytes | os.PathLike) else name}"


def _told(message: str) -> int:
    click.echo(f"Error: {message}", err=True)
    return FAILED
