"""From templates to C++ for the host: rendered as for NVRTC, with other files where inline assembly stands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2

from flashtune.errors import InvalidInput

from ..config import Config
from ..family import Family
from ..problem import Spec
from ..render import LineMarkingLoader, environment
from ..value import shown

HERE = Path(__file__).parent
SEAMS = {"lib/ptx.cuh": "ptx.cuh", "lib/ptx_sm90.cuh": "ptx_sm90.cuh", "lib/wgmma.cuh.jinja": "wgmma.cuh"}
"""Templates, and the files of this package that stand in for them."""

_ENTRY = """
extern "C" {{
extern const unsigned emulator_params_bytes;
const unsigned emulator_params_bytes = emulator_bytes({entry});
__attribute__((no_sanitize("thread"))) void emulator_kernel(const void* params) {{
  emulator_enter({entry}, static_cast<const char*>(params));
}}
}}
"""


class _Replacing(jinja2.BaseLoader):
    """Answers some templates with other text, all others from ``inner``."""

    def __init__(self, files: Mapping[str, str], inner: jinja2.BaseLoader) -> None:
        self.marked = LineMarkingLoader(jinja2.DictLoader(dict(files)))
        self.files = files
        self.inner = inner

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str | None, Callable[[], bool] | None]:
        if own := SEAMS.get(template):
            return f'#line 1 "emulator/{own}"\n{header(own)}', None, None
        loader = self.marked if template in self.files else self.inner
        return loader.get_source(environment, template)


@functools.cache
def header(name: str) -> str:
    """The text of a file of this package."""
    return (HERE / name).read_text(encoding="utf-8")


def host_source(family: Family, spec: Spec, config: Config, templates: Mapping[str, str] | None = None) -> str:
    """One C++ file with the kernel and its entry. ``templates`` are texts to take in place of files, by name.

    A name that no template has, or that of a seam, raises :class:`InvalidInput`: it would change nothing.
    """
    listed = environment().list_templates()
    for name in templates or {}:
        if name in SEAMS or name not in listed:
            known = ", ".join(each for each in listed if each not in SEAMS)
            raise InvalidInput(f"template {shown(name)} can't be replaced. What can: {known}")
    names = {"spec": spec, "config": config, **family.names(config, spec)}
    return host_text(f"{family.name}.cu.jinja", templates or {}, names, family.entry)


def host_text(main: str, templates: Mapping[str, str], names: Mapping[str, object], entry: str) -> str:
    """The template ``main`` rendered with ``names``, and what calls its kernel ``entry``."""
    text = _environment(frozenset(templates.items())).get_template(main).render(names)
    device, after = header("device.h"), header("entry.h")
    return f'#line 1 "emulator/device.h"\n{device}{text}#line 1 "emulator/entry.h"\n{after}{_ENTRY.format(entry=entry)}'


@functools.lru_cache(maxsize=4)
def _environment(templates: frozenset[tuple[str, str]]) -> jinja2.Environment:
    """That of the renderer with other files; it keeps the templates that it has read."""
    inner = environment().loader
    assert inner is not None
    return environment().overlay(loader=_Replacing(dict(templates), inner), bytecode_cache=None)
