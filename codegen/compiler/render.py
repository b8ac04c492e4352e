"""Generated CUDA: a kernel file that Jinja renders, and the headers that it includes, as the compiler is given them."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jinja2

from .template_cache import TemplateCache

_INCLUDE = re.compile(r'^[ \t]*#include "([^"\n]+)"[^\n]*\n', re.MULTILINE)
_SHIFTS = re.compile(r'\s*(?://%(?!%)|#include ")')
"""Lines that other lines take the place of, or none: control lines and includes."""
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NO_CODE = ("#line", "#pragma once")


@dataclass(frozen=True, slots=True)
class Source:
    """Generated CUDA as the compiler gets it, with ``#line`` directives that name the files in ``templates/``."""

    name: str
    text: str
    """The kernel file, with its ``#include`` lines."""
    headers: tuple[tuple[str, str], ...] = ()
    """(name, text) of each file that is included, in the order in which the compiler first meets them."""

    @property
    def digest(self) -> str:
        """SHA-256 of the code: comments, blank lines, ``#line`` and the borders between files don't count."""
        code = "\n".join(filter(None, map(_code, self._pieces())))
        return hashlib.sha256(code.encode()).hexdigest()

    def expanded(self) -> str:
        """One file, which needs no other: each header stands where it is first included."""
        return "".join(self._pieces())

    def readable(self) -> str:
        """:meth:`expanded` without what only a compiler needs."""
        return without_directives(self.expanded())

    def _pieces(self) -> Iterator[str]:
        return _pieces(self.text, dict(self.headers), set())


def _pieces(text: str, headers: Mapping[str, str], seen: set[str]) -> Iterator[str]:
    """``text`` cut at its includes, and in their places the pieces of the headers that are not ``seen`` yet."""
    for piece, name in _cut(text):
        yield piece
        if name and name not in seen:
            seen.add(name)
            yield from _pieces(headers[name], headers, seen)


@functools.lru_cache(maxsize=256)
def _cut(text: str) -> tuple[tuple[str, str], ...]:
    """``text`` in pieces, each with the name of the header that is included behind it; the last has none."""
    pieces, start = [], 0
    for found in _INCLUDE.finditer(text):
        pieces.append((text[start : found.start()], found[1]))
        start = found.end()
    return (*pieces, (text[start:], ""))


@functools.lru_cache(maxsize=256)
def _code(text: str) -> str:
    """``text`` without what does not count in a digest. Kept, since kernels share most of their headers."""
    lines = map(str.strip, _COMMENT.sub("", text).splitlines())
    return "\n".join([line for line in lines if line and not line.startswith(_NO_CODE)])


def without_directives(text: str) -> str:
    """``text`` without its ``#line`` and ``#pragma once``."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_NO_CODE))


class Templates:
    """The files of ``templates/``, some of them replaced: what is rendered, and what is included as it is.

    Control lines are ``//%`` comments, and an undefined name raises. ``replaced`` is text by name of a file, which need
    not be one of the package's.
    """

    def __init__(self, replaced: Mapping[str, str] | None = None) -> None:
        self._loader: jinja2.BaseLoader = jinja2.PackageLoader("flashtune.templates", "")
        if replaced:
            self._loader = jinja2.ChoiceLoader([jinja2.DictLoader(dict(replaced)), self._loader])
        self._environment = jinja2.Environment(
            loader=jinja2.FunctionLoader(self._marked),
            bytecode_cache=None if replaced else TemplateCache(),
            line_statement_prefix="//%",
            block_start_string="//%{",  # never written: "{%" and "{#" occur in PTX and C++
            block_end_string="}%//",
            comment_start_string="//%#",
            comment_end_string="#%//",
            line_comment_prefix="//%%",
            undefined=jinja2.StrictUndefined,
            autoescape=False,
            keep_trailing_newline=True,
            auto_reload=False,  # to look whether a file has changed took a fifth of a rendering
        )
        self._headers: dict[str, str] = {}

    def names(self) -> list[str]:
        """Names of the files, relative to ``templates/``."""
        return [name for name in self._loader.list_templates() if name.endswith((".cuh", ".jinja"))]

    def render(self, main: str, names: Mapping[str, object]) -> Source:
        """The template ``main`` and all that it includes; ``x.cuh`` may be rendered, too, from ``x.cuh.jinja``."""
        text = self._environment.get_template(main).render(names)
        headers: dict[str, str] = {}
        self._include(text, names, headers)
        return Source(main.removesuffix(".jinja"), text, tuple(headers.items()))

    def _include(self, text: str, names: Mapping[str, object], headers: dict[str, str]) -> None:
        for _, name in _cut(text):
            if name and name not in headers:
                headers[name] = self._header(name, names)
                self._include(headers[name], names, headers)

    def _header(self, name: str, names: Mapping[str, object]) -> str:
        if name not in self._headers:
            try:
                self._headers[name] = self._marked(name)[0]
            except jinja2.TemplateNotFound:
                return self._environment.get_template(f"{name}.jinja").render(names)
        return self._headers[name]

    def _marked(self, name: str) -> tuple[str, str | None, Callable[[], bool] | None]:
        """A file with a ``#line`` at its top and behind each line that is replaced by others."""
        text, path, fresh = self._loader.get_source(self._environment, name)
        marked = [f'#line 1 "templates/{name}"']
        for number, line in enumerate(text.splitlines(), start=1):
            marked.append(line)
            if _SHIFTS.match(line):
                marked.append(f'#line {number + 1} "templates/{name}"')
        return "\n".join(marked) + "\n", path, fresh


@functools.cache
def templates() -> Templates:
    """The files of the package."""
    return Templates()
