"""Problems from a file that nobody has checked: JSON, or YAML where PyYAML is installed.

The file is a list of problems by their fields. ``seqlen``, ``heads`` and ``heads_kv`` are shorthands, and what is left
out is as with the flags of the command line::

    [
      {"seqlen": 4096, "heads": 32, "heads_kv": 8, "head_dim": 128, "causal": true},
      {"dtype": "float16", "batch": 8, "seqlen_q": 1, "seqlen_k": 8192, "heads": 32, "head_dim": 128}
    ]

Known names, exact types and ranges only; nothing is evaluated. All is read before anything is tuned, and the first
thing that is wrong raises `InvalidInput` with the file, the problem (counted from 1) and the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashtune.codegen.problem.problem import Problem
from flashtune.errors import FlashtuneError, InvalidInput, MissingDependency
from flashtune.files import read_given, shown_path
from flashtune.values import printable, shown

FILE_LIMIT = 256 * 1024
"""Bytes of a file: room for `MAX_PROBLEMS`, and read in a moment."""
MAX_PROBLEMS = 1000

YAML_SUFFIXES = (".yaml", ".yml")
INSTALL_YAML = 'pip install "flashtune[yaml]"'

SHORTHANDS = {"heads": "num_heads", "heads_kv": "num_heads_kv"}
"""Names of the flags that fields of `Problem` are also known by. ``seqlen`` stands for two fields."""
_TYPES: dict[str, type] = {
    "dtype": str,
    "head_dim": int,
    "head_dim_v": int,
    "batch": int,
    "seqlen": int,
    "seqlen_q": int,
    "seqlen_k": int,
    "num_heads": int,
    "num_heads_kv": int,
    "causal": bool,
    "op": str,
    "alignment": int,
}
_WORDS = {str: "text", int: "a whole number", bool: "true or false"}
_NEEDED = {
    "head_dim": "head_dim",
    "num_heads": "heads",
    "seqlen_q": "seqlen or seqlen_q",
    "seqlen_k": "seqlen or seqlen_k",
}
"""What has no default, and what a message calls it."""


def read_problem_file(path: Path) -> list[Problem]:
    """The problems of the file at ``path``, in its order; see above."""
    name, text = shown_path(path), _text(path)
    data = _yaml(text, name) if path.suffix.lower() in YAML_SUFFIXES else _json(text, name)
    if not isinstance(data, list):
        raise InvalidInput(f"{name} must hold a list of problems, not {_kind(data)}")
    if not data:
        raise InvalidInput(f"{name} holds an empty list: there is no problem to tune")
    if len(data) > MAX_PROBLEMS:
        raise InvalidInput(f"{name} holds {len(data)} problems, at most {MAX_PROBLEMS} are allowed")
    problems = []
    for number, each in enumerate(data, start=1):
        try:
            problems.append(problem_from_fields(each))
        except FlashtuneError as error:
            raise InvalidInput(f"{name}, problem {number} of {len(data)}: {error}") from error
    return problems


def problem_from_fields(data: object) -> Problem:
    """One problem from untrusted named values; `InvalidInput` names the field, what it is and what is allowed."""
    if not isinstance(data, Mapping):
        raise InvalidInput(
            f"must be named values such as {{seqlen: 4096, heads: 16, head_dim: 128}}, not {_kind(data)}"
        )
    given: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, got in data.items():
        field = SHORTHANDS.get(name, name) if isinstance(name, str) else None
        if field not in _TYPES:
            raise InvalidInput(f"{_kind(name)} is no field of a problem. Known: {', '.join([*_TYPES, *SHORTHANDS])}")
        if field in given:
            raise InvalidInput(f"{field} is given twice, as {names[field]} and as {name}")
        if type(got) is not _TYPES[field]:
            raise InvalidInput(f"{name} must be {_WORDS[_TYPES[field]]}, not {_kind(got)}")
        given[field], names[field] = got, name
    if given.get("head_dim_v") == 0:  # a Problem takes it for the width of k; attention() refuses it
        raise InvalidInput("head_dim_v=0 must be at least 8; leave it out where it is head_dim")
    if {"seqlen", "seqlen_q", "seqlen_k"} <= given.keys():
        raise InvalidInput("seqlen is given beside both seqlen_q and seqlen_k: at most two of them are allowed")
    both = given.pop("seqlen", None)
    if both is not None:
        given = {"seqlen_q": both, "seqlen_k": both, **given}
    if missing := [words for field, words in _NEEDED.items() if field not in given]:
        raise InvalidInput(f"{', '.join(missing)} is missing")
    return Problem(**{"dtype": "bfloat16", "batch": 1, "num_heads_kv": given["num_heads"], **given})


def _text(path: Path) -> str:
    name = shown_path(path)
    try:
        raw = read_given(path, FILE_LIMIT, "file of problems")
    except OSError as error:
        raise InvalidInput(f"{name} can't be read: {error.strerror}") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name} is not text in UTF-8: byte {error.start} is none of it") from error


def _json(text: str, name: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_named_once)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{name}, line {error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits; lists in lists in lists
        raise InvalidInput(f"{name} is not a list of problems: {printable(str(error), 80)}") from error


def _named_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    named: dict[str, object] = {}
    for name, got in pairs:
        if name in named:
            raise ValueError(f"{shown(name)} stands twice in one problem")
        named[name] = got
    return named


def _yaml(text: str, name: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency(f"{name} is YAML, which needs PyYAML: {INSTALL_YAML}. JSON works without it") from error

    class Strict(yaml.SafeLoader):  # type: ignore[misc]
        """What ``yaml.safe_load`` loads with, which makes plain values only; and each name stands once."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(
                yaml.AliasEvent
            ):  # it can stand for any number of copies; no list of problems needs one
                event = self.peek_event()
                line = event.start_mark.line + 1
                raise InvalidInput(f"{name}, line {line}: aliases such as *{event.anchor[:40]} are not allowed")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            named = super().construct_mapping(node, deep)
            if len(named) != len(node.value):
                line = node.start_mark.line + 1
                raise InvalidInput(f"{name}, line {line}: a name stands twice in one problem")
            return named

    try:
        return yaml.load(text, Loader=Strict)
    except InvalidInput:
        raise
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InvalidInput(f"{name}{where}: not YAML: {printable(str(error.problem), 80)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a character, a date, lists in lists in lists
        raise InvalidInput(f"{name} is not YAML: {printable(str(error), 80)}") from error


def _kind(got: object) -> str:
    """``got`` for a message; of a list or a mapping its kind alone."""
    if isinstance(got, str | int | float | bool | None):
        return shown(got)
    if isinstance(got, list):
        return "a list"
    return "named values" if isinstance(got, dict) else f"a {type(got).__name__}"
