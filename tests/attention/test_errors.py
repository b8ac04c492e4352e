"""What `attention()` refuses: one error that names the value and what is allowed, before anything is done."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from fake_calls import refused

from flashtune import attention
from flashtune.codegen.families.sm80_fwd import Sm80Fwd, Sm80FwdConfig
from flashtune.codegen.plan.config import Config
from flashtune.errors import CompileError, IllegalConfig, InvalidInput, InvalidType, UnsupportedProblem

GOOD: dict[str, Any] = {
    "block_m": 64,
    "block_n": 64,
    "num_warps": 4,
    "num_stages": 1,
    "q_in_registers": False,
    "blocks_per_sm": 1,
}

Shape = tuple[int, ...]
SHAPES: list[tuple[str, Shape, Shape, Shape, type[Exception], list[str]]] = [
    ("rank of q", (4, 2, 16), (1, 4, 2, 16), (1, 4, 2, 16), InvalidInput, ["q", "(4, 2, 16)", "3 dim", "takes 4"]),
    ("rank of v", (1, 4, 2, 16), (1, 4, 2, 16), (1, 1, 4, 2, 16), InvalidInput, ["v", "5 dimensions"]),
    ("rank 0", (), (1, 4, 2, 16), (1, 4, 2, 16), InvalidInput, ["q", "0 dimensions"]),
    ("head_dim of k", (1, 4, 2, 16), (1, 4, 2, 24), (1, 4, 2, 16), InvalidInput, ["k", "head_dim 16", "head_dim 24"]),
    ("batch", (2, 4, 2, 16), (3, 4, 2, 16), (3, 4, 2, 16), InvalidInput, ["q has batch 2", "k has batch 3"]),
    ("batch of v", (2, 4, 2, 16), (2, 4, 2, 16), (1, 4, 2, 16), InvalidInput, ["q has batch 2", "v has batch 1"]),
    ("seqlen of v", (1, 4, 2, 16), (1, 5, 2, 16), (1, 6, 2, 16), InvalidInput, ["k has seqlen 5", "v has seqlen 6"]),
    ("heads of v", (1, 4, 4, 16), (1, 4, 2, 16), (1, 4, 4, 16), InvalidInput, ["num_heads 2", "num_heads 4"]),
    ("33 and 2", (1, 4, 33, 16), (1, 4, 2, 16), (1, 4, 2, 16), InvalidInput, ["33 heads", "have 2", "multiple"]),
    ("3 and 2", (1, 4, 3, 16), (1, 4, 2, 16), (1, 4, 2, 16), InvalidInput, ["3 heads", "have 2"]),
    ("4 and 0", (1, 4, 4, 16), (1, 4, 0, 16), (1, 4, 0, 16), InvalidInput, ["4 heads", "have 0"]),
    ("2 and 4", (1, 4, 2, 16), (1, 4, 4, 16), (1, 4, 4, 16), InvalidInput, ["2 heads", "have 4"]),
    ("0 and 0", (1, 4, 0, 16), (1, 4, 0, 16), (1, 4, 0, 16), InvalidInput, ["0 heads", "have 0"]),
    ("head_dim 0", (1, 4, 2, 0), (1, 4, 2, 0), (1, 4, 2, 0), InvalidInput, ["head_dim=0", "at least 1"]),
    ("head_dim_v 0", (1, 4, 2, 16), (1, 4, 2, 16), (1, 4, 2, 0), InvalidInput, ["head_dim_v=0", "at least 1"]),
    ("no query, head_dim_v 0", (1, 0, 2, 16), (1, 4, 2, 16), (1, 4, 2, 0), InvalidInput, ["head_dim_v=0"]),
    *(
        (f"head_dim {dim}", (1, 4, 2, dim), (1, 4, 2, dim), (1, 4, 2, dim), UnsupportedProblem, [str(dim), "8 to 256"])
        for dim in (1, 7, 20, 257, 260, 320, 512)
    ),
]


@pytest.mark.parametrize(("q", "k", "v", "error", "words"), [row[1:] for row in SHAPES], ids=[row[0] for row in SHAPES])
def test_shapes(fakes: Any, q: Shape, k: Shape, v: Shape, error: type[Exception], words: list[str]) -> None:
    refused(fakes, error, words, *(fakes.array(np.ones(shape, np.float16)) for shape in (q, k, v)))


def test_an_empty_result_is_no_excuse(fakes: Any) -> None:
    q, k = fakes.array(np.ones((0, 4, 3, 16), np.float16)), fakes.array(np.ones((0, 4, 2, 16), np.float16))
    refused(fakes, InvalidInput, ["3 heads"], q, k, k)


@pytest.mark.parametrize("dtype", ["float64", "int8", "bool", "complex64"])
def test_dtypes(fakes: Any, dtype: str) -> None:
    wrong = fakes.array(np.ones((1, 4, 2, 16), dtype))
    refused(fakes, InvalidType, [f"q has dtype {dtype}", "float16, bfloat16, float32"], wrong, wrong, wrong)


def test_unequal_dtypes(fakes: Any) -> None:
    q, wide = fakes.random(1, 4, 2, 16), fakes.random(1, 4, 2, 16, dtype=np.float32)
    refused(fakes, InvalidType, ["q has dtype float16", "k has float32"], q, wide, q)
    refused(fakes, InvalidType, ["q has dtype float16", "v has float32"], q, q, wide)


def test_two_devices_are_both_named(fakes: Any) -> None:
    q = fakes.random(1, 4, 2, 16)
    other = fakes.array(q.host, 1)
    refused(fakes, InvalidInput, ["q is on cuda:0", "k is on cuda:1"], q, other, q)
    refused(fakes, InvalidInput, ["q is on cuda:1", "v is on cuda:0"], other, other, q)


def test_other_libraries(fakes: Any) -> None:
    q = fakes.random(1, 4, 2, 16)
    refused(fakes, InvalidType, ["k is a numpy.ndarray on cpu", fakes.kind.name], q, q.host, q)
    refused(fakes, InvalidType, ["v is a builtins.list", fakes.kind.name], q, q, [1.0])
    refused(fakes, InvalidType, ["k is a builtins.NoneType", fakes.kind.name], q, None, q)
    refused(fakes, InvalidType, ["out is a numpy.ndarray", fakes.kind.name], q, q, q, out=q.host)


def test_an_address_between_elements(fakes: Any) -> None:
    host = fakes.memory((1, 4, 2, 16), np.float16, 1)
    host[...] = 1
    q = fakes.array(host)
    refused(fakes, InvalidInput, ["q is at address", "2-byte"], q, q, q)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scale": math.nan}, InvalidInput, ["scale=nan", "finite"]),
        ({"scale": -math.inf}, InvalidInput, ["scale=-inf", "finite"]),
        ({"scale": 1e39}, InvalidInput, ["scale=1e+39", "2**127"]),
        ({"scale": 10**400}, InvalidInput, ["finite"]),
        ({"scale": "1"}, InvalidType, ["scale='1'", "real number"]),
        ({"scale": 1j}, InvalidType, ["scale=1j", "real number"]),
        ({"scale": True}, InvalidType, ["scale=True", "real number"]),
        ({"scale": np.ones(3)}, InvalidType, ["scale=array", "real number"]),
        ({"causal": 2}, InvalidType, ["causal=2", "True or False"]),
        ({"causal": None}, InvalidType, ["causal=None", "True or False"]),
        ({"causal": []}, InvalidType, ["causal=[]", "True or False"]),
        ({"return_lse": "yes"}, InvalidType, ["return_lse='yes'", "True or False"]),
        ({"layout": "sbhd"}, InvalidInput, ["layout='sbhd'", "'bshd', 'bhsd'"]),
        ({"layout": None}, InvalidInput, ["layout=None", "'bshd', 'bhsd'"]),
        ({"layout": ["bshd"]}, InvalidInput, ["layout=['bshd']"]),
        ({"config": {"block_m": 64}}, InvalidType, ["config={'block_m': 64}", "kernel family"]),
        ({"config": "sm80_fwd"}, InvalidType, ["config='sm80_fwd'", "kernel family"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_options(fakes: Any, options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    q = fakes.random(1, 4, 2, 16)
    refused(fakes, error, words, q, q, q, **options)


def test_a_scale_with_more_digits_than_python_prints(fakes: Any) -> None:
    q = fakes.random(1, 4, 2, 16)
    refused(fakes, InvalidInput, ["scale=a value of type int", "finite"], q, q, q, scale=10**5000)


@pytest.mark.parametrize("scale", [0, -0.0, -3, 1e-45, 2.0**127, np.float32(0.5), Fraction(1, 3)], ids=repr)
def test_finite_real_scales_are_taken(fakes: Any, scale: Any) -> None:
    q = fakes.random(1, 4, 2, 16)
    attention(q, q, q, scale=scale)
    assert len(fakes.layer.launches) == 1


def test_a_config_that_its_family_rejects(fakes: Any) -> None:
    q = fakes.random(1, 4, 2, 16)
    wide = Sm80FwdConfig(**{**GOOD, "block_m": 256, "num_warps": 1})
    assert Sm80Fwd().name == wide.family
    refused(fakes, IllegalConfig, ["block_m=256", "rows per warp"], q, q, q, config=wide)


def test_a_config_of_a_family_that_does_not_serve_the_problem(fakes: Any) -> None:
    q = fakes.random(1, 4, 2, 16, dtype=np.float32)
    refused(fakes, UnsupportedProblem, ["float32", "bfloat16"], q, q, q, config=Sm80FwdConfig(**GOOD))


def test_a_config_of_no_family(fakes: Any) -> None:
    class Foreign(Config):
        family = "foreign"

    class Disguised(Config):
        family = "sm80_fwd"

    q = fakes.random(1, 4, 2, 16)
    refused(fakes, InvalidInput, ["'foreign'", "sm80_fwd"], q, q, q, config=Foreign())
    refused(fakes, InvalidInput, ["''", "sm80_fwd"], q, q, q, config=Config())
    refused(fakes, InvalidType, ["Disguised", "Sm80FwdConfig"], q, q, q, config=Disguised())


def test_a_kernel_that_can_not_be_built(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtune.call.choose._warned", False)
    fakes.layer.failure = CompileError("no")
    q = fakes.random(1, 4, 2, 16)
    with pytest.warns(RuntimeWarning, match="can't be used"), pytest.raises(CompileError, match="no"):
        attention(q, q, q)


@pytest.mark.parametrize("fakes", ["torch"], indirect=True)
class TestTorch:
    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_grad(self, fakes: Any, name: str) -> None:
        """Never a result that is silently detached; without grad all is well, before and after."""
        plain, tracked = fakes.random(1, 4, 2, 16), fakes.random(1, 4, 2, 16)
        tracked.requires_grad = True
        arrays = [tracked if each == name else plain for each in "qkv"]
        fakes.grad = False
        attention(*arrays)
        fakes.grad = True
        attention(plain, plain, plain)
        launched = len(fakes.layer.launches)
        with pytest.raises(NotImplementedError, match=r"requires grad.*no_grad"):
            attention(*arrays)
        assert len(fakes.layer.launches) == launched

    def test_grad_of_out(self, fakes: Any) -> None:
        q, out = fakes.random(1, 4, 2, 16), fakes.random(1, 4, 2, 16)
        out.requires_grad = True
        refused(fakes, NotImplementedError, ["requires grad", "no_grad"], q, q, q, out=out)

    def test_tangent(self, fakes: Any) -> None:
        q, dual = fakes.random(1, 4, 2, 16), fakes.random(1, 4, 2, 16)
        dual.tangent = q
        fakes.forward_ad._current_level = 0
        refused(fakes, NotImplementedError, ["forward-mode", "primal"], q, q, dual)
        attention(q, q, q)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            attention(dual, q, q)

    def test_cpu(self, fakes: Any) -> None:
        q = fakes.random(1, 4, 2, 16)
        on_cpu = fakes.array(q.host, -1)
        refused(fakes, InvalidInput, ["k is a torch tensor on cpu", "q cuda:0", "k cpu"], q, on_cpu, q)
        refused(fakes, InvalidInput, ["q is a torch tensor on cpu", "NumPy"], on_cpu, on_cpu, on_cpu)
        refused(fakes, InvalidInput, ["out is a torch tensor on cpu"], q, q, q, out=on_cpu)

    def test_sparse(self, fakes: Any) -> None:
        q, sparse = fakes.random(1, 4, 2, 16), fakes.random(1, 4, 2, 16)
        sparse.layout = "sparse_coo"
        refused(fakes, InvalidType, ["v", "sparse_coo", "strided"], q, q, sparse)

    def test_a_tensor_without_memory(self, fakes: Any) -> None:
        class Wrapped(type(fakes.random(1, 4, 2, 16))):  # type: ignore[misc]
            def __torch_dispatch__(self) -> None: ...

        q = fakes.random(1, 4, 2, 16)
        refused(fakes, InvalidType, ["k", "Wrapped", "memory of its own"], q, Wrapped(q.host), q)
        with pytest.raises(InvalidType, match=r"Wrapped.*memory of its own.*NumPy"):
            attention(Wrapped(q.host), q, q)

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_a_null_pointer_does_not_pass_for_a_call_seen_before(self, fakes: Any, at: int) -> None:
        class Null(type(fakes.random(1, 4, 2, 16))):  # type: ignore[misc]
            def __torch_dispatch__(self) -> None: ...

            def data_ptr(self) -> int:
                return 0

        arrays = [fakes.random(1, 4, 2, 16) for _ in range(3)]
        attention(*arrays)
        arrays[at] = Null(arrays[at].host)
        with pytest.raises(InvalidType, match="memory of its own"):
            attention(*arrays)
        assert len(fakes.layer.launches) == 1

    @pytest.mark.parametrize("at", [0, 1, 2])
    @pytest.mark.parametrize("warm", [True, False])
    def test_freed_memory_is_not_read(self, fakes: Any, at: int, warm: bool) -> None:
        """A hole in the tests: with ``True`` for the look at one of the addresses, a warm call launched with it."""
        arrays = [fakes.random(1, 4, 2, 16) for _ in range(3)]
        for _ in range(3 * warm):
            attention(*arrays)
        launched = len(fakes.layer.launches)
        arrays[at].freed = True
        with pytest.raises(InvalidType, match=f"{'qkv'[at]} is a tensor without memory of its own.*freed"):
            attention(*arrays)
        assert len(fakes.layer.launches) == launched

    @pytest.mark.parametrize("warm", [True, False])
    def test_freed_memory_is_not_written(self, fakes: Any, warm: bool) -> None:
        q, out = fakes.random(1, 4, 2, 16), fakes.random(1, 4, 2, 16)
        for _ in range(2 * warm):
            attention(q, q, q, out=out)
        launched = len(fakes.layer.launches)
        out.freed = True
        with pytest.raises(InvalidType, match=r"out is a tensor without memory of its own.*freed"):
            attention(q, q, q, out=out)
        assert len(fakes.layer.launches) == launched


@pytest.mark.parametrize("wrong", [None, 1.0, [[1.0]], object(), "abc"], ids=lambda value: type(value).__name__)
def test_no_array_at_all(wrong: object) -> None:
    with pytest.raises(InvalidType, match=f"q is a builtins.{type(wrong).__name__}.*CuPy arrays, torch CUDA tensors"):
        attention(wrong, wrong, wrong)


@pytest.mark.parametrize("name", ["scale", "causal", "layout"])
def test_an_option_that_is_an_array_is_refused_on_warm_calls_too(fakes: Any, name: str) -> None:
    arrays = [fakes.random(1, 4, 2, 16, seed=seed) for seed in range(3)]
    for _ in range(3):
        attention(*arrays)
    with pytest.raises((InvalidInput, InvalidType), match=f"{name}="):
        attention(*arrays, **{name: np.ones(3)})
