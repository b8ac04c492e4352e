"""Templates to CUDA source, with ``#line`` directives so that compiler errors name template files."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jinja2

from .config import Config
from .problem import Spec
from .template_cache import TemplateCache

_CONTROL = re.compile(r"^\s*//%(?!%)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Source:
    """Generated CUDA. ``text`` is what NVRTC compiles."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """SHA-256 of what the compiler sees: comments, ``#line`` and blank lines don't count."""
        stripped = _COMMENT.sub("", self.text)
        lines = map(str.strip, stripped.splitlines())
        kept = "\n".join([line for line in lines if line and not line.startswith("#line")])
        return hashlib.sha256(kept.encode()).hexdigest()

    def readable(self) -> str:
        """The text without ``#line`` directives."""
        return "\n".join(line for line in self.text.splitlines() if not line.startswith("#line")) + "\n"


class LineMarkingLoader(jinja2.BaseLoader):
    """Puts a ``#line`` at the top of each file and behind each control line, which vanishes when rendered.

    Files that end in .cuh are plain CUDA and come as one raw block: reading them token by token took most of the time
    that a process needed for its first source.
    """

    def __init__(self, inner: jinja2.BaseLoader) -> None:
        self.inner = inner

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str | None, Callable[[], bool] | None]:
        text, path, fresh = self.inner.get_source(environment, template)
        if template.endswith(".cuh"):
            text = text if text.endswith("\n") else text + "\n"
            return f'//%{{ raw }}%//#line 1 "templates/{template}"\n{text}//%{{ endraw }}%//', path, fresh
        marked = [f'#line 1 "templates/{template}"']
        for number, line in enumerate(text.splitlines(), start=1):
            marked.append(line)
            if _CONTROL.match(line):
                marked.append(f'#line {number + 1} "templates/{template}"')
        return "\n".join(marked) + "\n", path, fresh

    def list_templates(self) -> list[str]:
        return [name for name in self.inner.list_templates() if name.endswith((".cuh", ".jinja"))]


@functools.cache
def environment() -> jinja2.Environment:
    """The one Jinja environment: control lines are ``//%`` comments, undefined names raise."""
    return jinja2.Environment(
        loader=LineMarkingLoader(jinja2.PackageLoader("flashtune.templates", "")),
        bytecode_cache=TemplateCache(),
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


def render_source(family: str, spec: Spec, config: Config, names: Mapping[str, object]) -> Source:
    """The source of ``config`` for ``spec``: a pure function of its arguments and the templates."""
    template = environment().get_template(f"{family}.cu.jinja")
    text = template.render(spec=spec, config=config, **names)
    return Source(name=f"{family}.cu", text=text)
