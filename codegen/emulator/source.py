"""From a config to C++ for the host: the templates rendered as for NVRTC, with another ``lib/ptx.cuh``."""

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
SEAM = "lib/ptx.cuh"
"""The template that the host's ptx.cuh replaces."""

_ENTRY = """
#line 1 "emulator/entry"
extern "C" {{
extern const unsigned emulator_params_bytes;
const unsigned emulator_params_bytes = sizeof(Params);
__attribute__((no_sanitize("thread"))) void emulator_kernel(const void* params) {{
  {entry}(*static_cast<const Params*>(params));
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
        if template == SEAM:
            return f'#line 1 "emulator/ptx.cuh"\n{header("ptx.cuh")}', None, None
        loader = self.marked if template in self.files else self.inner
        return loader.get_source(environment, template)


@functools.cache
def header(name: str) -> str:
    """The text of a file of this package."""
    return (HERE / name).read_text(encoding="utf-8")


def host_source(family: Family, spec: Spec, config: Config, templates: Mapping[str, str] | None = None) -> str:
    """One C++ file with the kernel and its entry. ``templates`` are texts to take in place of files, by name.

    A name that no template has, or that of the seam, raises :class:`InvalidInput`: it would change nothing.
    """
    inner = environment().loader
    assert inner is not None
    for name in templates or {}:
        if name == SEAM or name not in environment().list_templates():
            known = ", ".join(each for each in environment().list_templates() if each != SEAM)
            raise InvalidInput(f"template {shown(name)} can't be replaced. What can: {known}")
    jinja = environment().overlay(loader=_Replacing(templates or {}, inner))
    text = jinja.get_template(f"{family.name}.cu.jinja").render(spec=spec, config=config, **family.names(config, spec))
    return f'#line 1 "emulator/device.h"\n{header("device.h")}{text}{_ENTRY.format(entry=family.entry)}'
