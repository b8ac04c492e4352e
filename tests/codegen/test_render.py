"""Rendering: what the compiler sees, which line it blames, and what counts as the same source."""

from __future__ import annotations

import dataclasses
import re

import jinja2
import pytest

from flashtune.codegen.families.sm80_fwd import Sm80Fwd
from flashtune.codegen.gpu import gpu_by_alias
from flashtune.codegen.problem import Spec
from flashtune.codegen.render import Source, environment, render_source

SPEC = Spec(dtype="float16", head_dim=64)
FAMILY = Sm80Fwd()
CONFIG = FAMILY.default(SPEC, gpu_by_alias("a100"))


def rendered(spec: Spec = SPEC) -> Source:
    return render_source("sm80_fwd", spec, CONFIG, FAMILY.names(CONFIG, spec))


def test_every_line_directive_names_the_line_that_follows() -> None:
    loader = jinja2.PackageLoader("flashtune.templates", "")
    originals: dict[str, list[str]] = {}
    checked = 0
    name, number = "", 0
    for line in rendered().text.splitlines():
        if found := re.fullmatch(r'#line (\d+) "templates/(.+)"', line):
            number, name = int(found[1]), found[2]
            continue
        if name not in originals:
            originals[name] = loader.get_source(environment(), name)[0].splitlines()
        original = originals[name][number - 1] if number <= len(originals[name]) else ""
        if line and "{{" not in original:
            assert line == original, f"{name}:{number}"
            checked += 1
        number += 1
    assert checked > 300


def test_nothing_of_the_template_language_is_left() -> None:
    text = rendered().text
    assert "//%" not in text
    assert "{{" not in text


def test_a_missing_name_raises() -> None:
    with pytest.raises(jinja2.UndefinedError, match="element"):
        render_source("sm80_fwd", SPEC, CONFIG, {})


def test_digest_ignores_comments_blank_lines_and_line_directives() -> None:
    text = '#line 3 "a"\n// why\nint x;  // here\n\n/* two\nlines */\nint y;\n'
    assert Source("a", text).digest == Source("b", "int x;\n  int y;\n").digest
    assert Source("a", text).digest != Source("a", text.replace("int y", "int z")).digest


def test_digest_depends_on_spec_and_config() -> None:
    causal = dataclasses.replace(SPEC, causal=True)
    assert rendered().digest != rendered(causal).digest
    assert rendered().digest == rendered().digest


def test_readable_text_has_no_line_directives() -> None:
    assert "#line" not in rendered().readable()
