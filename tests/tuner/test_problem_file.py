"""Problems from a file: what is taken, and that whatever is wrong is refused with its place."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import run

import flashtune
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput, MissingDependency
from flashtune.tuner.tune.problem_file import FILE_LIMIT, MAX_PROBLEMS, problem_from_fields, read_problem_file

SHORT = {"seqlen": 4096, "heads": 32, "head_dim": 128}
FULL = Problem(
    dtype="bfloat16", head_dim=128, batch=1, seqlen_q=4096, seqlen_k=4096, num_heads=32, num_heads_kv=32
)  # fmt: skip


def written(tmp_path: Path, content: object, name: str = "mine.json") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_shorthands_and_defaults_are_those_of_the_flags(tmp_path: Path) -> None:
    more = {**SHORT, "heads_kv": 8, "causal": True, "dtype": "float16", "batch": 2, "head_dim_v": 64}
    found = read_problem_file(written(tmp_path, [SHORT, more]))
    assert found[0] == FULL
    assert str(found[1]) == "float16 d128/64 b2 s4096 h32/8 causal"


def test_every_field_goes_by_its_own_name_too(tmp_path: Path) -> None:
    fields = {"num_heads": 32, "num_heads_kv": 8, "seqlen_q": 1, "seqlen_k": 8192, "head_dim": 128, "alignment": 2}
    (found,) = read_problem_file(written(tmp_path, [fields]))
    assert (found.num_heads_kv, found.seqlen_q, found.seqlen_k, found.alignment) == (8, 1, 8192, 2)


def test_a_file_of_very_many_names_is_read_in_a_moment(tmp_path: Path) -> None:
    """Where a name stands twice is found in one pass, not by looking at all names before it for each."""
    names = ",".join(f'"{number:x}":1' for number in range(22_000))
    path = written(tmp_path, f'[{{{names},"0":1}}]')
    assert path.stat().st_size < FILE_LIMIT
    start = time.process_time()
    with pytest.raises(InvalidInput, match="'0' stands twice in one problem"):
        read_problem_file(path)
    assert time.process_time() - start < 5, "0.02 s; the other way more than 20"


def test_one_length_may_differ_from_seqlen() -> None:
    found = problem_from_fields({**SHORT, "seqlen_q": 16})
    assert (found.seqlen_q, found.seqlen_k) == (16, 4096)


def test_yaml_holds_the_same(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = "- {seqlen: 4096, heads: 32, head_dim: 128}\n- seqlen: 512\n  heads: 4\n  head_dim: 64\n  causal: true\n"
    found = read_problem_file(written(tmp_path, text, "mine.yml"))
    assert found[0] == FULL
    assert found[1].causal


def test_yaml_without_pyyaml_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependency, match=r'pip install "flashtune\[yaml\]"'):
        read_problem_file(written(tmp_path, "- 1", "mine.yaml"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": "128"}, "head_dim must be a whole number, not '128'"),
        ({"head_dim": 128.0}, "head_dim must be a whole number, not 128.0"),
        ({"heads": True}, "heads must be a whole number, not True"),
        ({"causal": 1}, "causal must be true or false, not 1"),
        ({"dtype": None}, "dtype must be text, not None"),
        ({"dtype": "float8"}, "dtype='float8' is not supported. Supported: float16"),
        ({"batch": [1] * 1000}, "batch must be a whole number, not a list"),
        ({"batch": -1}, "batch=-1 must be at least 1"),
        ({"heads_kv": 5}, "must be a multiple of num_heads_kv=5"),
        ({"seqlen": 2**40}, "must be at most"),
        ({"num_heads": 32}, "num_heads is given twice, as heads and as num_heads"),
        ({"head_dim_v": 0}, "head_dim_v=0 must be at least 8"),
        ({"seqlen_q": 1, "seqlen_k": 2}, "seqlen is given beside both"),
        ({"window": 5}, "'window' is no field of a problem. Known: dtype, head_dim"),
        ({"out_dtype": "float32"}, "'out_dtype' is no field of a problem"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = written(tmp_path, [SHORT, {**SHORT, **changes}])
    with pytest.raises(InvalidInput) as caught:
        read_problem_file(path)
    assert str(caught.value).startswith(f"{path}, problem 2 of 2: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("faulty", [1, 2, 3, 4])
def test_the_place_is_that_of_the_first_fault_counted_from_1(tmp_path: Path, faulty: int, suffix: str) -> None:
    if suffix == "yaml":
        pytest.importorskip("yaml")
    entries: list[object] = [SHORT] * (faulty - 1) + [{**SHORT, "batch": 0}, None, SHORT]  # equal ones count, each
    path = written(tmp_path, entries, f"mine.{suffix}")  # JSON is YAML too
    with pytest.raises(InvalidInput) as caught:
        read_problem_file(path)
    assert str(caught.value) == f"{path}, problem {faulty} of {faulty + 2}: batch=0 must be at least 1"


@pytest.mark.parametrize(
    ("left_out", "message"),
    [("head_dim", "head_dim is missing"), ("heads", "heads is missing"), ("seqlen", "seqlen or seqlen_q, seqlen or")],
)
def test_what_is_missing_is_named(left_out: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        problem_from_fields({name: got for name, got in SHORT.items() if name != left_out})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"problems": []}, "must hold a list of problems, not named values"),
        ("3", "must hold a list of problems, not 3"),
        ([], "holds an empty list"),
        ([[SHORT]], "problem 1 of 1: must be named values such as .*, not a list"),
        ([SHORT, None, SHORT], "problem 2 of 3: must be named values such as .*, not None"),
        ([SHORT] * (MAX_PROBLEMS + 1), f"holds {MAX_PROBLEMS + 1} problems, at most {MAX_PROBLEMS}"),
        ('[{"seqlen": 1,\n "seqlen" 2}]', "line 2: not JSON"),
        ('[{"seqlen": 1, "seqlen": 2}]', "'seqlen' stands twice"),
        ("[" * 100_000, "is not a list of problems"),
        ('[{"seqlen": ' + "9" * 5000 + "}]", "is not a list of problems"),
        (" " * FILE_LIMIT + "[]", "has more than 262144 bytes"),
    ],
    ids=["object", "number", "empty", "nested", "null", "many", "syntax", "twice", "deep", "digits", "large"],
)
def test_files_that_hold_no_problems_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_problem_file(written(tmp_path, content))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- seqlen: 1\n  seqlen: 2\n", "line 1: a name stands twice"),
        ("- &a {seqlen: 1}\n- *a\n", r"line 2: aliases such as \*a are not allowed"),
        ("- &a [x, x]\n- &b {<<: [*a, *a]}\n", "aliases"),
        ("- !!python/object/apply:os.system ['echo no']\n", "not YAML: could not determine a constructor"),
        ("- {seqlen: 2024-02-30}\n", "is not YAML"),
        (
            "- {seqlen: 2024-02-03, heads: 1, head_dim: 8}\n",
            "problem 1 of 1: seqlen must be a whole number, not a date",
        ),
        ("- [seqlen\n", "line 2: not YAML"),
        ("- \x01\n", "is not YAML"),
        ("[" * 5000, "is not YAML|not YAML"),
        ("- {[1, 2]: 3}\n", "not YAML"),
    ],
    ids=["twice", "alias", "merge", "tag", "no-date", "date", "syntax", "control", "deep", "key"],
)
def test_yaml_is_read_strictly(tmp_path: Path, text: str, message: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(InvalidInput, match=message) as caught:
        read_problem_file(written(tmp_path, text, "mine.yaml"))
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_and_files_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(b"[\xff]")
    with pytest.raises(InvalidInput, match="byte 1"):
        read_problem_file(path)
    with pytest.raises(InvalidInput, match=f"^file of problems {tmp_path} is a folder, not a file$"):
        read_problem_file(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_only_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """m3: a pipe that nobody writes to was waited for."""
    monkeypatch.chdir(tmp_path)
    path = Path("/dev/zero" if kind == "device" else "it")
    with socket.socket(socket.AF_UNIX) as listener:
        match kind:
            case "pipe":
                os.mkfifo(path)
            case "socket":
                listener.bind(str(path))
            case "folder":
                path.mkdir()
        with pytest.raises(InvalidInput, match=f"^file of problems {path} is a {kind}, not a file$"):
            read_problem_file(path)


DIGEST = ["db", "digest", "--gpu", "h100", "--problems"]


@pytest.mark.parametrize(
    "script",
    ['"$@" - < mine.json', 'cat mine.json | "$@" -', 'cat mine.json | "$@" /dev/stdin', '"$@" /dev/fd/7 7< mine.json'],
)
def test_problems_may_come_from_what_the_user_has_opened(tmp_path: Path, script: str) -> None:
    """m3: standard input, and what shells make of ``<(...)``."""
    written(tmp_path, [SHORT])
    environment = {**os.environ, "PYTHONPATH": str(Path(flashtune.__file__).parents[1]), "FLASHTUNE_DB": "none.db"}
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "flashtune", *DIGEST],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    named = run(*DIGEST, tmp_path / "mine.json").stdout
    assert done.stdout == named


def test_what_is_wrong_with_standard_input_is_said_of_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "flashtune", *DIGEST, "-"],
        env=environment, capture_output=True, text=True, check=False, input="[{}]",
    )  # fmt: skip
    assert done.stderr.startswith("Error: /dev/stdin, problem 1 of 1: head_dim, heads")


def test_text_of_the_file_moves_no_cursor(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(InvalidInput) as caught:
        read_problem_file(written(tmp_path, "- !\u202egnp.\u2066 x\n", "mine.yaml"))
    assert str(caught.value).isprintable()
