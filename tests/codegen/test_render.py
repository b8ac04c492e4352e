"""Rendering: what the compiler sees, which line it blames, and what counts as the same source."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jinja2
import pytest

from flashtune.codegen.compiler.render import Source, Templates, templates
from flashtune.codegen.families.sm80_fwd import Sm80Fwd
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Spec

TEMPLATES = Path(__file__).parents[2] / "templates"
SPEC = Spec(dtype="float16", head_dim=64)
FAMILY = Sm80Fwd()
CONFIG = FAMILY.default(SPEC, gpu_by_alias("a100"))

X, Y = "#pragma once\nint x;\n", '#pragma once\n#include "x.cuh"\nint y;  // uses x\n'


def rendered(spec: Spec = SPEC) -> Source:
    return FAMILY.source(CONFIG, spec)


@pytest.mark.parametrize("spec", [SPEC, dataclasses.replace(SPEC, causal=True)], ids=str)
def test_every_line_directive_names_the_line_that_follows(spec: Spec) -> None:
    originals: dict[str, list[str]] = {}
    checked = 0
    name, number = "", 0
    for line in rendered(spec).expanded().splitlines():
        if found := re.fullmatch(r'#line (\d+) "templates/(.+)"', line):
            number, name = int(found[1]), found[2]
            continue
        if name not in originals:
            originals[name] = (TEMPLATES / name).read_text(encoding="utf-8").splitlines()
        original = originals[name][number - 1] if number <= len(originals[name]) else ""
        if line and "{{" not in original:
            assert line == original, f"{name}:{number}"
            checked += 1
        number += 1
    assert checked > 300


def test_nothing_of_the_template_language_is_left() -> None:
    text = rendered().expanded()
    assert "//%" not in text
    assert "{{" not in text


def test_a_missing_name_raises() -> None:
    with pytest.raises(jinja2.UndefinedError, match="element"):
        templates().render("sm80_fwd.cu.jinja", {"spec": SPEC, "config": CONFIG})


def test_digest_ignores_comments_blank_lines_and_line_directives() -> None:
    text = '#line 3 "a"\n// why\nint x;  // here\n\n/* two\nlines */\nint y;\n'
    assert Source("a", text).digest == Source("b", "int x;\n  int y;\n").digest
    assert Source("a", text).digest != Source("a", text.replace("int y", "int z")).digest


def test_digest_is_that_of_one_file_wherever_the_borders_are() -> None:
    whole = Source("a", "int x;\nint y;\nint z;\n")
    parts = Source("a", '#include "y.cuh"\nint z;\n#include "x.cuh"\n', (("y.cuh", Y), ("x.cuh", X)))
    assert parts.digest == whole.digest
    assert parts.expanded().count("int x;") == 1
    assert Source("a", parts.text, (("y.cuh", Y.replace("int y", "int w")), ("x.cuh", X))).digest != whole.digest


def test_digest_depends_on_spec_and_config() -> None:
    causal = dataclasses.replace(SPEC, causal=True)
    assert rendered().digest != rendered(causal).digest
    assert rendered().digest == rendered().digest


def test_readable_text_is_one_file_without_directives() -> None:
    text = rendered().readable()
    assert not re.search("^#", re.sub("#pragma unroll.*", "", text), re.MULTILINE)
    assert "cp_async_16" in text


def test_a_header_is_given_once_and_in_the_order_of_the_includes() -> None:
    names = [name for name, _ in rendered().headers]
    assert names == re.findall(r'#include "(.+)"', rendered().text)
    assert len(set(names)) == len(names) > 5


def test_a_header_may_include_others_and_be_rendered() -> None:
    texts = {
        "a.cu.jinja": '#include "b.cuh"\n#include "c.cuh"\n',
        "b.cuh": '#pragma once\n#include "c.cuh"\nint b;\n',
        "c.cuh.jinja": "int c = {{value}};\n",
    }
    source = Templates(texts).render("a.cu.jinja", {"value": 3})
    assert source.readable() == "int c = 3;\nint b;\n"
    assert [name for name, _ in source.headers] == ["b.cuh", "c.cuh"]


def test_a_header_that_is_not_there_is_named() -> None:
    with pytest.raises(jinja2.TemplateNotFound, match=r"none\.cuh"):
        Templates({"a.cu.jinja": '#include "none.cuh"\n'}).render("a.cu.jinja", {})
