"""Arrays that have broken attention libraries: strides, values of another width, what is refused; on both libraries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from expected import expect, skip_unless_free

from flashtune import attention
from flashtune.codegen.families.fma_fwd import FmaFwd
from flashtune.codegen.families.registry import supporting
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.problem.problem import Spec
from flashtune.errors import FlashtuneError, InvalidInput

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

WIDTHS = ((192, 128), (128, 64), (64, 128), (72, 40))
"""Columns of q and k, and of v."""


@pytest.mark.parametrize("widths", WIDTHS, ids="{0[0]}/{0[1]}".format)
class TestValuesOfAnotherWidth:
    """v and the output have other columns than q and k."""

    @staticmethod
    def inputs(widths: tuple[int, int], shape: tuple[int, ...]) -> list[Any]:
        batch, seqlen_q, seqlen_k, heads, heads_kv = shape
        draw = np.random.default_rng(widths)
        head_dim, head_dim_v = widths
        shapes = (
            (batch, seqlen_q, heads, head_dim),
            (batch, seqlen_k, heads_kv, head_dim),
            (batch, seqlen_k, heads_kv, head_dim_v),
        )
        return [draw.standard_normal(each) + 0.25 for each in shapes]

    @pytest.mark.parametrize("causal", [False, True])
    def test_random_values(self, library: Any, dtype: str, widths: tuple[int, int], causal: bool) -> None:
        found = []
        for shape in library.SHAPES:
            found += library.problems_of(*self.inputs(widths, shape), dtype, causal=causal)
        assert not found, "\n".join(found)

    @pytest.mark.parametrize("accumulate", ["float32", "float64"])
    def test_the_portable_kernel(self, library: Any, dtype: str, widths: tuple[int, int], accumulate: str) -> None:
        """fma_fwd where another kernel would be chosen; its float64 form too."""
        spec = Spec(dtype=dtype, head_dim=widths[0], head_dim_v=widths[1])
        gpu, family = require_device(), FmaFwd()
        config = replace(family.default(spec, gpu), accumulate=accumulate)
        if reason := family.illegal(config, spec, gpu):
            pytest.skip(f"{config}: {reason}")
        assert not library.problems_of(*self.inputs(widths, library.SHAPES[0]), dtype, config=config)

    def test_a_new_output_in_both_layouts(self, library: Any, dtype: str, widths: tuple[int, int]) -> None:
        """Two calls each: the first and a warm one."""
        values = self.inputs(widths, library.SHAPES[1])
        found = []
        for layout in ("bshd", "bhsd"):
            turned = [each.swapaxes(1, 2) if layout == "bhsd" else each for each in values]
            arrays = [library.put(each, dtype).array for each in turned]
            for _ in range(2):
                out, lse = attention(*arrays, return_lse=True, layout=layout)
                assert tuple(out.shape) == (*turned[0].shape[:3], widths[1])
                got = library.read(out, dtype)
                got = got.swapaxes(1, 2) if layout == "bhsd" else got
                found += library.judge(got, library.read(lse, "float32"), values, dtype, layout)
        assert not found

    def test_rows_that_begin_anywhere(self, library: Any, dtype: str, widths: tuple[int, int]) -> None:
        """Each tensor starts one element off a 16-byte boundary."""
        found = []
        for causal in (False, True):
            values = self.inputs(widths, library.SHAPES[0])
            arrays = [library.put(each, dtype, shift=1).array for each in values]
            out = library.put(np.full((*values[0].shape[:3], widths[1]), np.nan), dtype, shift=1)
            _, lse = attention(*arrays, causal=causal, out=out.array, return_lse=True)
            assert out.outside_is_nan()
            label = f"one element off {causal=}"
            found += library.judge(out.host(), library.read(lse, "float32"), values, dtype, label, causal=causal)
        assert not found

    def test_a_v_with_a_last_stride_other_than_one(self, library: Any, dtype: str, widths: tuple[int, int]) -> None:
        q, k, v = self.inputs(widths, library.SHAPES[0])
        arrays = [library.put(q, dtype).array, library.put(k, dtype).array]
        out, lse = attention(*arrays, library.put(v, dtype, axes=(0, 1, 3, 2)).array, return_lse=True)
        assert not library.judge(library.read(out, dtype), library.read(lse, "float32"), (q, k, v), dtype, "copied v")

    def test_an_out_of_the_width_of_q_is_refused(self, library: Any, dtype: str, widths: tuple[int, int]) -> None:
        q, k, v = (library.put(each, dtype).array for each in self.inputs(widths, library.SHAPES[0]))
        out = library.put(np.zeros(tuple(q.shape)), dtype)
        with pytest.raises(InvalidInput, match="that of q with the head_dim of v"):
            attention(q, k, v, out=out.array)


class TestStrides:
    def inputs(self) -> list[Any]:
        draw = np.random.default_rng(3)
        return [draw.standard_normal((2, rows, heads, 64)) for rows, heads in ((37, 6), (70, 2), (70, 2))]

    def judged(self, library: Any, dtype: str, arrays: list[Any], values: Any, label: str, **options: Any) -> list[str]:
        """Two calls, the first and a warm one, on ``arrays`` that hold ``values``."""
        found = []
        for time in ("first", "warm"):
            out, lse = attention(*arrays, return_lse=True, **options)
            got = library.read(out, dtype)
            got = got.swapaxes(1, 2) if options.get("layout") == "bhsd" else got
            found += library.judge(got, library.read(lse, "float32"), values, dtype, f"{label} {time}")
        return found

    def test_each_tensor_has_its_own(self, library: Any, dtype: str) -> None:
        q, k, v = self.inputs()
        longer = np.full((2, 74, 6, 64), np.nan)
        longer[:, ::2] = q
        placed = library.put(longer, dtype)
        batch, row, head, _ = placed.strides
        q_array = library.view(placed.buffer, placed.offset, q.shape, (batch, 2 * row, head, 1))
        arrays = [q_array, library.put(k, dtype).array, library.put(v, dtype, axes=(0, 2, 1, 3)).array]
        assert not self.judged(library, dtype, arrays, (q, k, v), "own strides")

    def test_heads_first_layout(self, library: Any, dtype: str) -> None:
        values = self.inputs()
        arrays = [library.put(each.swapaxes(1, 2), dtype).array for each in values]
        assert not self.judged(library, dtype, arrays, values, "bhsd", layout="bhsd")

    @pytest.mark.parametrize("seqlen_k", [32, 33, 34, 65])
    def test_expanded_heads_and_batch(self, library: Any, dtype: str, seqlen_k: int) -> None:
        draw = np.random.default_rng(seqlen_k)
        q = draw.standard_normal((2, 20, 8, 128))
        k, v = (draw.standard_normal((1, seqlen_k, 1, 128)) for _ in range(2))
        shape = (2, seqlen_k, 8, 128)
        arrays = [library.put(q, dtype).array]
        for each in (k, v):
            placed = library.put(each, dtype)
            arrays.append(library.view(placed.buffer, placed.offset, shape, (0, 128, 0, 1)))
        values = (q, np.broadcast_to(k, shape), np.broadcast_to(v, shape))
        assert not self.judged(library, dtype, arrays, values, "expanded")

    def test_reversed_keys(self, library: Any, dtype: str) -> None:
        if library.name == "torch":
            pytest.skip("torch has no negative strides")
        q, k, v = self.inputs()
        arrays = [library.put(q, dtype).array, *(library.put(each, dtype).array[:, ::-1] for each in (k, v))]
        assert arrays[1].strides[1] < 0
        assert not self.judged(library, dtype, arrays, (q, k[:, ::-1], v[:, ::-1]), "reversed")

    def test_alignment_changes_from_call_to_call(self, library: Any, dtype: str) -> None:
        q, k, v = self.inputs()
        wide = np.full((2, 70, 2, 65), np.nan)
        wide[..., :64] = k
        narrow = library.put(wide, dtype)
        k_narrow = library.view(narrow.buffer, narrow.offset, k.shape, narrow.strides)
        q_array, k_array, v_array = (library.put(each, dtype).array for each in (q, k, v))
        found = self.judged(library, dtype, [q_array, k_array, v_array], (q, k, v), "aligned")
        shifted = library.put(q, dtype, shift=1).array
        found += self.judged(library, dtype, [shifted, k_array, v_array], (q, k, v), "q one element off")
        found += self.judged(library, dtype, [q_array, k_narrow, v_array], (q, k, v), "rows of 65")
        found += self.judged(library, dtype, [q_array, k_array, v_array], (q, k, v), "aligned again")
        library.synchronize()
        assert not found

    def test_out_one_element_off(self, library: Any, dtype: str) -> None:
        values = self.inputs()
        out = library.put(np.full(values[0].shape, np.nan), dtype, shift=1)
        _, lse = attention(*(library.put(each, dtype).array for each in values), out=out.array, return_lse=True)
        assert not library.judge(out.host(), library.read(lse, "float32"), values, dtype, "out off by one")
        assert out.outside_is_nan()

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_a_last_stride_other_than_one(self, library: Any, dtype: str, which: int) -> None:
        """Copied on each call; the copies of torch and CuPy are kernels of theirs."""
        values = self.inputs()
        arrays = [library.put(each, dtype).array for each in values]
        arrays[which] = library.put(values[which], dtype, axes=(0, 1, 3, 2)).array
        assert not self.judged(library, dtype, arrays, values, f"last stride of argument {which}")

    @pytest.mark.usefixtures("memory")
    def test_offsets_beyond_32_bits(self, library: Any) -> None:
        """The last of 32 batch entries of 75.5 million elements gives what it gives alone, bit for bit."""
        library.dtype("bfloat16")
        skip_unless_free(library, 11)
        from flashtune.codegen.gpu.cuda import cupy

        shape = (32, 131072, 8, 72)
        entry_bytes = 2 * math.prod(shape[1:])
        draw = np.random.default_rng(1)
        q = library.put(draw.standard_normal((32, 1, 8, 72)), "bfloat16").array
        whole, alone = [], []
        for _ in range(2):
            buffer = self.zeros(library, math.prod(shape))
            entry = self.repeated(library, draw.standard_normal((1024, 8, 72)), 128)
            address = entry.data_ptr() if library.name == "torch" else entry.data.ptr
            start = buffer.data_ptr() if library.name == "torch" else buffer.data.ptr
            cupy.cuda.runtime.memcpy(start + 31 * entry_bytes, address, entry_bytes, 3)
            whole.append(buffer.reshape(shape))
            alone.append(entry)
        spec = Spec(dtype="bfloat16", head_dim=72)
        gpu = require_device()
        config = supporting(spec, gpu)[0].default(spec, gpu)
        out = attention(q, *whole, config=config)[31:]
        want = attention(q[31:], *alone, config=config)
        got, want = library.get(out), library.get(want)
        assert (got == want).all(), f"{library.name}: {int((got != want).sum())} of {got.size} values differ"

    @pytest.mark.usefixtures("memory")
    def test_strides_of_a_packed_cache(self, library: Any) -> None:
        """k and v are slices of heads of one 8.6 GB buffer."""
        library.dtype("bfloat16")
        skip_unless_free(library, 10)
        from flashtune.codegen.gpu.cuda import cupy

        repeats, width = 263, 128 * 128
        rows = 997 * repeats  # no power of two: an offset that wraps around meets other values
        buffer = self.zeros(library, rows * width).reshape((1, rows, 128, 128))
        start = buffer.data_ptr() if library.name == "torch" else buffer.data.ptr
        draw = np.random.default_rng(2)
        tile = draw.standard_normal((997, 16, 128))
        source = self.repeated(library, tile, repeats)
        address = source.data_ptr() if library.name == "torch" else source.data.ptr
        row_bytes = 2 * 16 * 128
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memcpy2DAsync(start, 2 * width, address, row_bytes, row_bytes, rows, 3, stream)
        library.synchronize()
        q = library.put(draw.standard_normal((1, 1, 8, 128)), "bfloat16").array
        contiguous = [self.repeated(library, tile[:, heads], repeats) for heads in (slice(0, 8), slice(8, 16))]
        spec = Spec(dtype="bfloat16", head_dim=128)
        gpu = require_device()
        config = supporting(spec, gpu)[0].default(spec, gpu)
        got = library.get(attention(q, buffer[:, :, 0:8], buffer[:, :, 8:16], config=config))
        want = library.get(attention(q, *contiguous, config=config))
        assert (got == want).all(), f"{library.name}: {int((got != want).sum())} of {got.size} values differ"

    @staticmethod
    def repeated(library: Any, tile: Any, times: int) -> Any:
        """``tile`` (rows, heads, head_dim) again and again along the rows of one batch entry."""
        rows, heads, head_dim = tile.shape
        buffer = library.put_bits(np.tile(library.encode(tile, "bfloat16").reshape(-1), times), "bfloat16")
        shape = (1, rows * times, heads, head_dim)
        return library.view(buffer, 0, shape, (math.prod(shape), heads * head_dim, head_dim, 1))

    @staticmethod
    def zeros(library: Any, count: int) -> Any:
        if library.name == "torch":
            return library.torch.zeros(count, dtype=library.torch.bfloat16, device="cuda")
        return library.cupy.zeros(count, np.uint16).view(library.dtype("bfloat16"))


class TestErrors:
    def test_the_gpu_stays_usable(self, library: Any, dtype: str) -> None:
        """Arrays of another kind or place, and overlap, are refused before anything is launched."""
        host = np.ones((1, 4, 1, 64), np.float32)
        q = library.put(host, dtype).array
        wrong: list[tuple[Any, dict[str, Any]]] = [
            ((q, host, q), {}),
            ((host, q, q), {}),
            ((q, q, q), {"out": q}),
            ((q, q, q), {"scale": math.nan}),
            ((q, q[:, :2], q), {}),
        ]
        if library.name == "torch":
            wrong += [((q, q.cpu(), q), {}), ((q.cpu(),) * 3, {})]
        for arrays, options in wrong:
            with pytest.raises(FlashtuneError):
                attention(*arrays, **options)
        library.synchronize()
        out, lse = library.run(host, host, host, dtype)
        assert not expect(f"{library.name} {dtype} after errors", out, lse, [1.0] * 4, [8 + math.log(4)] * 4)

    def test_libraries_do_not_mix(self, library: Any) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        from flashtune.codegen.gpu.cuda import cupy

        q = library.put(np.ones((1, 4, 1, 64)), "float16").array
        other = cupy.zeros((1, 4, 1, 64), np.float16) if library.name == "torch" else torch.zeros((1, 4, 1, 64)).half()
        with pytest.raises(TypeError, match="k is a "):
            attention(q, other, q)

    def test_grad(self, library: Any) -> None:
        if library.name != "torch":
            pytest.skip("CuPy has no gradients")
        torch = library.torch
        q, other = (torch.ones((1, 4, 1, 64), dtype=torch.float16, device="cuda") for _ in range(2))
        q.requires_grad_()
        for arrays in ((q, other, other), (other, q, other), (other, other, q)):
            with pytest.raises(NotImplementedError, match="no_grad"):
                attention(*arrays)
            with torch.no_grad():
                assert not attention(*arrays).requires_grad
            with pytest.raises(NotImplementedError, match="no_grad"):
                attention(*arrays)

    def test_freed_memory(self, library: Any) -> None:
        if library.name != "torch":
            pytest.skip("torch alone frees the storage of a tensor that lives on")
        torch = library.torch
        arrays = [torch.ones((1, 4, 1, 64), dtype=torch.float16, device="cuda") for _ in range(4)]
        for _ in range(3):
            attention(*arrays[:3], out=arrays[3])
            attention(*arrays[:3])
        for each in (*arrays[1:3], arrays[3]):
            size = each.untyped_storage().size()
            each.untyped_storage().resize_(0)
            with pytest.raises(FlashtuneError, match="memory of its own"):
                attention(*arrays[:3], out=arrays[3] if each is arrays[3] else None)
            each.untyped_storage().resize_(size)
            each.fill_(1)
        attention(*arrays[:3])
        torch.cuda.synchronize()
