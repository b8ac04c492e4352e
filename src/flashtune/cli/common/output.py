"""Standard output and error as the commands use them: text of others moves no cursor there, and errors have a name.

Whatever a command prints passes an `Output`, or the console of `tables.py`: both show control characters as escapes,
so that none in a database, a path, a compiler's message or a line of a log reaches a terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, marks that turn the direction of text, and what no encoding can write."""


class OutputError(OSError):
    """Standard output can't be written. What is still meant for it goes nowhere."""


def safe(text: str) -> str:
    """``text`` with an escape such as ``\\x1b`` for each character that a terminal would act upon."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class _Stream:
    """A standard stream that takes any character. An error of standard output is an `OutputError`; of one of standard
    error nobody can be told."""

    def __init__(self, stream: TextIO, is_error: bool) -> None:
        self._stream = stream
        self._is_error = is_error

    def write(self, text: str) -> int:
        if not text:  # click writes that to find out what this is, and takes no notice of an error
            return 0
        encoding = self._stream.encoding or "utf-8"
        with self._failures():
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._failures():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> _Bytes:
        return _Bytes(self)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Python would fail at its end on what is left in the buffer, with an exit code of 120.
            with suppress(OSError, ValueError):  # not a file, as under a test runner
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            if not self._is_error:
                raise OutputError(error.errno, error.strerror, "standard output") from error


class _Bytes:
    """Where click writes bytes, such as what completes words in a shell: they are text of a stream as well."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def write(self, content: bytes) -> int:
        self._stream.write(content.decode("utf-8", "surrogateescape"))
        return len(content)

    def flush(self) -> None:
        self._stream.flush()


class Output(_Stream):
    """A standard stream for text that may be of others. ``styled`` is the same stream for a console, which has codes of
    its own."""

    encoding = "utf-8"
    """What click asks for: to a stream that has ASCII it would write UTF-8, past this one."""

    def __init__(self, stream: TextIO, *, is_error: bool) -> None:
        super().__init__(stream, is_error)
        self.styled = _Stream(stream, is_error)

    def write(self, text: str) -> int:
        super().write(safe(text))
        return len(text)


@contextmanager
def safe_output() -> Iterator[None]:
    """Standard output and error are an `Output` in the block, in front of whatever they are now."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:  # the shell closed it, and the next file to be opened would have its number
                stream = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect(cast(TextIO, Output(stream, is_error=redirect is redirect_stderr))))
        yield
