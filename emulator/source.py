"""From templates to C++ for the host: rendered as for NVRTC, with other files where inline assembly stands."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from flashtune.codegen.compiler.render import Templates, templates
from flashtune.codegen.families.family import AnyFamily
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Spec
from flashtune.errors import InvalidInput
from flashtune.values import shown

RUNTIME_FOLDER = Path(__file__).parent / "runtime"
SEAMS = {"lib/ptx.cuh": "ptx.cuh", "lib/ptx_sm90.cuh": "ptx_sm90.cuh", "lib/wgmma.cuh": "wgmma.cuh"}
"""Headers, and the files of this package that stand in for them."""

_ENTRY = """
extern "C" {{
extern const unsigned emulator_params_bytes;
const unsigned emulator_params_bytes = emulator_bytes({entry});
__attribute__((no_sanitize("thread"))) void emulator_kernel(const void* params) {{
  emulator_enter({entry}, static_cast<const char*>(params));
}}
}}
"""


@functools.cache
def header(name: str) -> str:
    """The text of a file of this package."""
    return (RUNTIME_FOLDER / name).read_text(encoding="utf-8")


def host_source(family: AnyFamily, spec: Spec, config: Config, replaced: Mapping[str, str] | None = None) -> str:
    """One C++ file with the kernel and its entry. ``replaced`` are texts to take in place of files, by name.

    A name that no template has, or that of a seam, raises :class:`InvalidInput`: it would change nothing.
    """
    listed = [each for each in templates().names() if each.removesuffix(".jinja") not in SEAMS]
    for name in replaced or {}:
        if name not in listed:
            raise InvalidInput(f"template {shown(name)} can't be replaced. What can: {', '.join(listed)}")
    names = {"spec": spec, "config": config, **family.names(config, spec)}
    return host_text(f"{family.name}.cu.jinja", replaced or {}, names, family.entry)


def host_text(main: str, replaced: Mapping[str, str], names: Mapping[str, object], entry: str) -> str:
    """The template ``main`` rendered with ``names``, and what calls its kernel ``entry``."""
    text = _templates(frozenset(replaced.items())).render(main, names).expanded()
    device, after = header("device.h"), header("entry.h")
    return f'#line 1 "emulator/device.h"\n{device}{text}#line 1 "emulator/entry.h"\n{after}{_ENTRY.format(entry=entry)}'


@functools.lru_cache(maxsize=4)
def _templates(replaced: frozenset[tuple[str, str]]) -> Templates:
    """Kept, since it keeps the templates that it has read."""
    seams = {name: f'#line 1 "emulator/{own}"\n{header(own)}' for name, own in SEAMS.items()}
    return Templates(seams | dict(replaced))
