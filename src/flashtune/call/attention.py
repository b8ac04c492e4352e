"""`attention()`: finds who serves the arrays and hands the call over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arrays import kind_of, kinds
from .options import flag, real_scale

if TYPE_CHECKING:
    from flashtune.codegen.plan.config import Config


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    out: Any = None,
    layout: str = "bshd",
    config: Config | None = None,
) -> Any:
    """Exact attention, ``softmax(scale * q @ k^T) @ v``, without ever storing the score matrix.

    Arrays are CuPy arrays or torch CUDA tensors, all of one library, dtype (float16, bfloat16 or float32) and device;
    the result is of the same kind and ready on that library's current stream. NumPy arrays run on the CPU.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim). On a GPU head_dim is a multiple of 8 from 8 to 256.
        k: (batch, seqlen_k, num_heads_kv, head_dim). ``num_heads`` is a multiple of ``num_heads_kv``: query head h
            reads key head ``h // (num_heads // num_heads_kv)``.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v). head_dim_v may be another than head_dim, with the same limits.
        causal: Key j is visible to query i when ``j <= i + seqlen_k - seqlen_q``: the last query sees every key.
            Flags are of type bool or numpy.bool, never 0, 1 or an array.
        scale: Any real number up to 2**127 in magnitude, 0 and negative ones too; None is ``1 / sqrt(head_dim)``.
        return_lse: Also return the natural logarithm of the sum of exp of the scaled visible scores: float32,
            contiguous (batch, num_heads, seqlen_q) for both layouts.
        out: Receives the output: (batch, seqlen_q, num_heads, head_dim_v), dtype and device of q, last stride 1. Its
            memory range, from the first to the last byte it reaches, may not touch that of q, k or v.
        layout: ``"bshd"`` as above, or ``"bhsd"`` with heads before rows, for q, k, v and out alike.
        config: Launch this config of a kernel family instead of the one that tuning or the default picks.

    Strides are arbitrary, negative and zero ones too. Only a q, k or v whose last stride is not 1 is copied first, on
    every call. Rows that see no key give 0, with an LSE of -inf.

    Where there are too few tiles of queries to fill the GPU, several thread blocks share the keys of one. They need a
    workspace, at most some tens of MB, which each call takes from the library's allocator and gives back. In a CUDA
    graph that CuPy captures it is kept for good, since CuPy reserves nothing for graphs.

    The first call with new shapes, strides, dtypes or options validates, looks the kernel up and loads it; 4096 such
    kinds of call are remembered per array library, the oldest are forgotten. Later calls cost microseconds. Both can be
    captured in a CUDA graph, a first one with a driver of CUDA 12.3 or newer, and a first call leaves a capture in
    another thread alone.

    Returns:
        The output, (batch, seqlen_q, num_heads, head_dim_v) in the layout of q, contiguous unless ``out`` is given;
        with ``return_lse`` the pair (output, LSE).

    Raises:
        InvalidInput, InvalidType: An argument is wrong; nothing was allocated or launched. Also on a first call inside
            a CUDA graph capture whose kernel can't be loaded there, before anything that the capture forbids.
        UnsupportedProblem: No kernel, or not the family of ``config``, serves the problem on this GPU.
        IllegalConfig: ``config`` can't be used for the problem on this GPU.
        CompileError, LaunchError, MissingDependency: see :mod:`flashtune.errors`.
        ContextLost: A LaunchError after which the GPU can only be used from a new process.
        NotImplementedError: A tensor requires grad while grad is enabled.

    Example:
        >>> import numpy as np
        >>> from flashtune import attention
        >>> q = k = v = np.ones((1, 128, 8, 64), np.float16)
        >>> attention(q, k, v, causal=True).shape
        (1, 128, 8, 64)
    """
    # Options are parts of keys, where 1 equals True: each comes in one type, or a call would be judged by earlier ones.
    if causal is not False and causal is not True:
        causal = flag("causal", causal)
    if return_lse is not False and return_lse is not True:
        return_lse = flag("return_lse", return_lse)
    if scale is not None and type(scale) is not float:
        scale = real_scale(scale)
    kind = kinds.get(type(q)) or kind_of(q)
    return kind.call(q, k, v, out, (causal, scale, return_lse, layout, config))
