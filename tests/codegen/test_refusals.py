"""May this family, or this config, serve that here? One answer, which holds those before it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from test_import_direction import name, own_files

from flashtune.codegen.families.registry import families, unusable
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem

PROBLEM = Problem(
    dtype="float16", head_dim=64, batch=1, seqlen_q=256, seqlen_k=256, num_heads=4, num_heads_kv=4, causal=False
)
H200, OLD = gpu_by_alias("h200"), replace(gpu_by_alias("h200"), capability=(7, 0))
PARTS = {"unsupported", "illegal", "unfit"}


@pytest.mark.parametrize("family", families())
def test_an_operation_that_a_family_does_not_have_is_refused(family: str) -> None:
    """Two of three families never looked at it: the day that there is another one they would have claimed it."""
    kind = families()[family]
    spec = replace(PROBLEM.spec, op="backward")
    assert kind.refuses(spec, H200) == "op=backward is not supported. Supported: forward"
    config = kind.default(PROBLEM.spec, H200)
    assert kind.refuses_config(config, spec, H200) == kind.refuses(spec, H200)


@pytest.mark.parametrize("family", families())
def test_each_question_holds_the_one_before(family: str) -> None:
    kind = families()[family]
    config = kind.default(PROBLEM.spec, H200)
    assert unusable(config, PROBLEM, H200) is None
    assert kind.refuses(PROBLEM.spec, OLD)
    assert unusable(config, PROBLEM, OLD) == kind.refuses_config(config, PROBLEM.spec, OLD)
    assert kind.refuses_config(config, PROBLEM.spec, OLD) == kind.refuses(PROBLEM.spec, OLD)
    huge = replace(PROBLEM, seqlen_q=2**20, batch=2**12, num_heads=2**8, num_heads_kv=2**8)
    assert kind.refuses_config(config, huge.spec, H200) is None
    assert "thread blocks, a launch takes at most" in str(unusable(config, huge, H200))


@pytest.mark.parametrize("path", [path for path in own_files() if path.parent.name != "families"], ids=name)
def test_nobody_else_composes_the_answer_of_its_parts(path: Path) -> None:
    """It was composed in six ways, one of which had forgotten two parts."""
    tree = ast.parse(path.read_text("utf-8"))
    assert not PARTS & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
