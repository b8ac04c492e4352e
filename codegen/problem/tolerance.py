"""The tolerance rule: one for tests, tuner and benchmarks.

Against a float64 reference, the error of ours may be at most twice the error of a plain implementation plus one unit
in the last place (ulp) of the output dtype; both the maximum and the root mean square (RMS).

One ulp is taken at the magnitude of each reference element, not of the largest: a small output next to large ones is
not excused. So the maximum rule reads ``|ours - reference| <= 2 max|plain - reference| + ulp(reference)`` for every
element, and the RMS rule adds the RMS of these ulps. Values that are not finite have to match: NaN where the reference
has NaN, the same infinity where it has one or where it overflows the output dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashtune.errors import InvalidInput

from .reference import plain_attention

FACTOR = 2.0
"""How much larger than the plain implementation's error ours may be."""

MAX_ORDERS = 16
ENOUGH_SCORES = 4096
"""Numbers of attention scores whose errors say enough about those of others."""

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Format:
    mantissa_bits: int
    min_exponent: int
    """Of normal numbers."""
    overflow: float
    """The smallest magnitude that rounds to infinity."""


_FORMATS = {
    "float16": _Format(10, -14, 65520.0),
    "bfloat16": _Format(7, -126, (2.0 - 2.0**-8) * 2.0**127),
    "float32": _Format(23, -126, (2.0 - 2.0**-24) * 2.0**127),
    "float64": _Format(52, -1022, np.inf),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one comparison; true if within tolerance.

    ``max_error`` and ``max_bound`` are those of the element nearest to, or farthest beyond, its own bound. Where
    values that are not finite don't match, the errors are infinite.
    """

    ok: bool
    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float
    text: str
    """One line for people."""

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class Tolerance:
    """What is allowed around one reference; made once, used to judge many results."""

    reference: Array
    """float64; infinite where the output dtype overflows."""
    ulp: Array
    plain_max: float
    plain_rms: float

    def judge(self, ours: Array) -> Verdict:
        """Compares ``ours``, of any dtype that converts to float64, with the reference."""
        if ours.shape != self.reference.shape:
            raise InvalidInput(f"shape {ours.shape} is compared with a reference of shape {self.reference.shape}")
        got = ours.astype(np.float64)
        finite = np.isfinite(self.reference)
        with np.errstate(invalid="ignore"):
            error = np.where(finite, np.abs(got - self.reference), 0.0)
        max_bound = FACTOR * self.plain_max + self.ulp
        rms_bound = FACTOR * self.plain_rms + _rms(self.ulp[finite])

        mismatch = np.isnan(got) != np.isnan(self.reference)
        mismatch |= (np.isinf(got) | np.isinf(self.reference)) & (got != self.reference)
        if mismatch.any():
            at = _first(mismatch)
            text = (
                f"wrong: {int(mismatch.sum())} of {got.size} values differ in kind, the first at {at}: "
                f"{float(got[at]):.6g}, must be {float(self.reference[at]):.6g}"
            )
            return Verdict(False, np.inf, float(max_bound.max()), np.inf, rms_bound, text)
        if not finite.any():
            return Verdict(True, 0.0, 0.0, 0.0, 0.0, f"ok: none of {got.size} values is finite, all match")

        excess = np.where(finite, error - max_bound, -np.inf)
        at = tuple(int(index) for index in np.unravel_index(int(excess.argmax()), excess.shape))
        max_error, bound, rms_error = float(error[at]), float(max_bound[at]), _rms(error[finite])
        ok = max_error <= bound and rms_error <= rms_bound
        text = (
            f"{'ok' if ok else 'wrong'}: max error {max_error:.3g} (bound {bound:.3g}), "
            f"RMS error {rms_error:.3g} (bound {rms_bound:.3g})"
        )
        if not ok:
            text += (
                f", {int((excess > 0).sum())} of {got.size} values beyond their bound, the worst at {at}: "
                f"{float(got[at]):.9g}, must be {float(self.reference[at]):.9g}"
            )
        return Verdict(ok, max_error, bound, rms_error, rms_bound, text)


def tolerance(plain: Array, reference: Array, dtype: str) -> Tolerance:
    """The tolerance for results in ``dtype`` (a name: bfloat16 values may come as float32 arrays).

    ``plain`` may have one more axis in front, for the results of several plain implementations. Elements that they
    lose to NaN or infinity don't widen the tolerance.
    """
    if dtype not in _FORMATS:
        raise InvalidInput(f"dtype={dtype[:40]!r} has no tolerance. Known: {', '.join(_FORMATS)}")
    if plain.shape not in (reference.shape, (len(plain), *reference.shape)):
        raise InvalidInput(f"the plain result has shape {plain.shape}, the reference {reference.shape}")
    exact = reference.astype(np.float64)
    exact = np.where(np.abs(exact) >= _FORMATS[dtype].overflow, np.copysign(np.inf, exact), exact)
    got = plain.astype(np.float64)
    got, aligned = np.broadcast_arrays(got, exact)
    both = np.isfinite(got) & np.isfinite(aligned)
    error = np.abs(got[both] - aligned[both])
    return Tolerance(exact, ulp(exact, dtype), float(error.max(initial=0.0)), _rms(error))


def attention_tolerances(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    dtype: str = "",
    out_dtype: str = "",
) -> tuple[Tolerance, Tolerance]:
    """What is allowed for out and LSE of one attention problem, computed in NumPy; dtypes as in `plain_attention`.

    The error of a plain implementation on few numbers is a matter of luck. So small problems are computed with the
    head dimension in several orders, which are equally plain, until there are enough numbers to rely on.
    """
    dtype = dtype or q.dtype.name
    out, lse = plain_attention(q, k, v, causal=causal, scale=scale)
    scores = q.shape[0] * q.shape[1] * q.shape[2] * max(1, k.shape[1])
    orders = [np.arange(q.shape[3])]
    random = np.random.default_rng(0)
    while len(orders) < MAX_ORDERS and len(orders) * scores < ENOUGH_SCORES:
        orders.append(random.permutation(q.shape[3]))
    plain = [
        plain_attention(
            q[..., each],
            k[..., each],
            v,
            causal=causal,
            scale=scale,
            compute_dtype=np.float32,
            dtype=dtype,
            out_dtype=out_dtype,
        )
        for each in orders
    ]
    plain_out, plain_lse = (np.stack(parts) for parts in zip(*plain, strict=True))
    return tolerance(plain_out, out, out_dtype or dtype), tolerance(plain_lse, lse, "float32")


def judge(ours: Array, plain: Array, reference: Array, dtype: str) -> Verdict:
    """Whether ``ours`` is within tolerance of ``reference``, given the result of a plain implementation.

    ``dtype`` is the name of the output dtype; for the LSE that is float32. See :func:`tolerance`.
    """
    return tolerance(plain, reference, dtype).judge(ours)


def ulp(values: Array, dtype: str) -> NDArray[np.float64]:
    """Distance of neighbouring numbers of ``dtype`` at the magnitude of each value; 0 where it is not finite."""
    form = _FORMATS[dtype]
    finite = np.isfinite(values)
    _, exponent = np.frexp(np.where(finite, values, 0.0).astype(np.float64))  # |value| = [0.5, 1) * 2**exponent
    exponent = np.maximum(np.where(values == 0, form.min_exponent, exponent - 1), form.min_exponent)
    return np.where(finite, np.ldexp(1.0, exponent - form.mantissa_bits), 0.0)


def _rms(values: Array) -> float:
    if not values.size:
        return 0.0
    largest = float(values.max())
    if largest == 0.0:
        return 0.0
    return largest * float(np.sqrt(np.mean(np.square(values / largest))))  # squares must not underflow


def _first(flags: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.argwhere(flags)[0])
