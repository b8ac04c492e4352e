"""The host's forms of device functions: in step with templates/lib/ptx.cuh, and right for every 16-bit number."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Spec
from flashtune.codegen.problem.reference import rounded
from flashtune.emulator import build, source
from flashtune.errors import InvalidInput, MissingDependency

ROOT = Path(__file__).parents[3]
SIGNATURE = re.compile(r"__device__ __forceinline__ (\w+) (\w+(?:<\w+>)?)\(([^;{]*?)\)\s*[;{]", re.DOTALL)


def signatures(text: str) -> set[tuple[str, str, str]]:
    """(result, name, parameters) of the device functions in ``text``, without what only the host adds."""
    found = set()
    for result, name, parameters in SIGNATURE.findall(text):
        shown = re.sub(r"(,\s*|^)(EMULATOR_SITE|const char\s*\*\s*file,\s*int line)", "", parameters)
        found.add((result, name, " ".join(shown.split())))
    return {each for each in found if not each[1].startswith("emulator_")}


@pytest.mark.parametrize(("name", "least"), [("lib/ptx.cuh", 16), ("lib/ptx_sm90.cuh", 30), ("lib/wgmma.cuh", 2)])
def test_the_host_has_exactly_the_functions_of_the_device(name: str, least: int) -> None:
    files = [ROOT / "templates" / f"{name}{suffix}" for suffix in ("", ".jinja")]
    device = signatures(next(each for each in files if each.exists()).read_text(encoding="utf-8"))
    assert len(device) >= least
    assert signatures(source.header(source.SEAMS[name])) == device


def test_constants_are_those_of_the_device() -> None:
    constant = re.compile(r"constexpr u64 (kCache\w+) = (\w+);")
    device = constant.findall((ROOT / "templates" / "lib" / "ptx_sm90.cuh").read_text(encoding="utf-8"))
    assert len(device) == 3
    assert constant.findall(source.header("ptx_sm90.cuh")) == device


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_number_becomes_the_right_float(dtype: str, toy: Callable[..., Any]) -> None:
    element = {"float16": "Half", "bfloat16": "BFloat16"}[dtype]
    body = f"""
  u32 wrong = 0;
  for (u32 bits = thread; bits < 65536; bits += 128) {{
    const float value = to_float({element}{{static_cast<u16>(bits)}});
    const u32 again = from_float<{element}>(value).bits;
    if (value == value ? again != bits : again != 0x7fff) ++wrong;
    if (pack<{element}>(value, 1.0f) != (again | static_cast<u32>(from_float<{element}>(1.0f).bits) << 16)) ++wrong;
  }}
  out[thread] = wrong;
"""
    assert (toy(body).out == 0).all()


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversion_rounds_to_nearest_even(dtype: str, toy: Callable[..., Any]) -> None:
    element = {"float16": "Half", "bfloat16": "BFloat16"}[dtype]
    draw = np.random.default_rng(1)
    ties = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25]
    spread = draw.standard_normal(100) * 10.0 ** draw.integers(-9, 6, 100)
    values = np.concatenate([ties, spread, [0, -0.0, 1e38, -1e-45]])
    values = np.resize(values.astype(np.float32), 128)
    listed = ", ".join(f"{int(each):#x}" for each in values.view(np.uint32))
    body = f"""
  const u32 bits[128] = {{{listed}}};
  out[thread] = to_float(from_float<{element}>(__int_as_float(bits[thread])));
"""
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(toy(body).out.reshape(-1), rounded(values, dtype))


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingDependency, match=r"none of c\+\+, g\+\+, clang\+\+ is found. Install"):
        build.find_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(MissingDependency, match="CXX='no-such-compiler -O2' is not found"):
        build.find_compiler()


@pytest.mark.parametrize("name", ["lib/tiles.cuh", "lib/ptx.cuh", "__init__.py"])
def test_a_template_that_would_change_nothing_is_refused(name: str) -> None:
    spec = Spec(dtype="float16", head_dim=64)
    rules = family("sm80_fwd")
    with pytest.raises(InvalidInput, match=r"can't be replaced\. What can: .*lib/tile\.cuh"):
        source.host_source(rules, spec, rules.default(spec, gpu_by_alias("h200")), {name: ""})
