"""Measurements as hypothesis draws them: every status and stage, with odd values that are valid. For all tests here."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from flashtune.codegen.families.registry import family
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.records.limits import MESSAGE_LIMIT, NUMBERS, TEXTS
from flashtune.tuned_db.records.measurement import STAGES, STATUSES, THROTTLES, Measurement

GPUS = (("9.0a/h200/132sm/smem232448/l2-62914560/141gb", "h200"), ("8.0/ä card", "ä card"), ("12.0a/数/ü/c", "数"))
"""Keys of device models with their names: a model has one."""

DATES = ("2026-11-29T12:00:00.000Z", "2024-02-29T23:59:59.999Z", "1970-01-01T00:00:00.000Z")


def floats(low: float, high: float, *odd: float) -> st.SearchStrategy[float | int | None]:
    """Numbers in range, its ends and whole ones among them, or nothing."""
    return st.one_of(
        st.none(),
        st.floats(low, high, allow_nan=False),
        st.integers(max(1, int(low)), int(min(high, 10**6))),
        st.sampled_from((low, high, *odd)),
    )


times = floats(1e-3, 1e12, 80, 1 / 3, 10**12)
errors = floats(0.0, 1.7e308, -0.0, 0, 5e-324, 10**300)
texts = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=20)
messages = st.text(max_size=60) | st.sampled_from(("a\nb\tc", "{{ 7*7 }}", "\ud800 half a pair", "\0", "é" * 2500))
versions = st.from_regex(r"[0-9A-Za-z.+_-]{0,12}", fullmatch=True)
whole = st.none() | st.integers(0, 65536)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    heads = draw(st.integers(1, 5))
    return Problem(
        dtype=draw(st.sampled_from(("float16", "bfloat16"))),
        head_dim=draw(st.sampled_from((8, 64, 256))),
        batch=draw(st.integers(1, 2) | st.just(2**31 - 1)),
        seqlen_q=draw(st.sampled_from((1, 17, 1024))),
        seqlen_k=draw(st.sampled_from((0, 1, 2**20))),
        num_heads=heads * draw(st.integers(1, 3)),
        num_heads_kv=heads,
        causal=draw(st.booleans()),
        alignment=draw(st.sampled_from((2, 16))),
        head_dim_v=draw(st.sampled_from((0, 64, 72))),
    )


@st.composite
def configs(draw: st.DrawFn) -> Any:
    kind = family(draw(st.sampled_from(("pair", "solo")))).config_type
    return kind(**{each.name: draw(st.sampled_from(each.choices)) for each in kind.parameters()})


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    """Any that :meth:`Store.add` takes, also with what it makes `failed` or cuts."""
    status = draw(st.sampled_from(tuple(STATUSES)))
    digest = draw(st.sampled_from(("a" * 64, "0123456789abcdef" * 4)))
    gpu_key, gpu_name = draw(st.sampled_from(GPUS))
    ratios = draw(st.none() | st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3).map(sorted))
    low, paired, high = ratios or (None, None, None)
    return Measurement(
        id=str(draw(st.uuids())),
        created=draw(st.sampled_from(DATES)),
        session=draw(texts.filter(bool)),
        problem=draw(problems()),
        gpu_key=gpu_key,
        gpu_name=gpu_name,
        config=draw(configs()),
        source_digest=digest if status == "ok" else draw(st.sampled_from(("", digest))),
        status=status,
        stage=draw(st.sampled_from(STAGES)),
        median_us=draw(times | st.sampled_from((float("nan"), float("inf"), 0.0))),
        q20_us=draw(times),
        q80_us=draw(times),
        samples=draw(st.integers(0, 2**31 - 1)),
        baseline_us=draw(times),
        paired_ratio=paired,
        ratio_low=low,
        ratio_high=high,
        rounds=draw(st.none() | st.integers(1, 2**31 - 1)),
        max_error=draw(errors),
        rms_error=draw(errors),
        registers=draw(whole),
        spill_bytes=draw(whole),
        shared_bytes=draw(whole),
        clock_mhz=draw(floats(0.0, 100_000.0)),
        power_w=draw(floats(0.0, 100_000.0, -0.0)),
        temperature_c=draw(floats(-100.0, 1000.0, -0.0, -40)),
        throttle=draw(st.none() | st.lists(st.sampled_from(tuple(THROTTLES)), unique=True).map(",".join)),
        contended=draw(st.none() | st.booleans()),
        unit=draw(texts),
        driver=draw(texts),
        nvrtc=draw(versions),
        cupy=draw(versions),
        flashtune=draw(versions),
        author=draw(texts),
        seed=draw(st.none() | st.sampled_from((0, 2**63 - 1))),
        message=draw(messages),
    )


def sets_of_rows(most: int = 5) -> st.SearchStrategy[list[Measurement]]:
    """No two under one id."""
    return st.lists(measurements(), max_size=most, unique_by=lambda each: each.id)


_LONGEST = "a", "\u00e9", '"', "\\", "\U00010380"
"""Letters that take one byte to twelve as JSON."""
_SHORT = {"nvrtc": 60, "cupy": 60, "flashtune": 60}
"""Texts that are shorter than others may be, of letters that take one byte."""


@st.composite
def extremes(draw: st.DrawFn) -> Measurement:
    """At the limits of what a row may hold, as `limits` has them: texts as long, numbers as large as allowed."""
    _, _, shared, _ = TEXTS[Measurement]
    letters = st.sampled_from(_LONGEST)
    changes: dict[str, Any] = {name: draw(letters) * 200 for name in shared if name not in (*_SHORT, "gpu_key")}
    changes |= {name: "v" * length for name, length in _SHORT.items()}
    changes["gpu_key"] = f"99.9z/{draw(st.integers(0, 999)):03}{draw(letters) * 191}"
    changes["gpu_name"] = changes["gpu_key"][6:]
    for name, types, low, high, _ in NUMBERS[Measurement][1]:
        ends = [low, high, *((low / 3 + high / 7, low * 1.1 + 1e-9) if float in types else ())]
        changes[name] = draw(st.sampled_from([types[-1](each) for each in ends]))
    low, middle, high = sorted(changes[name] for name in ("ratio_low", "paired_ratio", "ratio_high"))
    changes |= {"ratio_low": low, "paired_ratio": middle, "ratio_high": high}
    changes["message"] = draw(letters | st.just("\n")) * MESSAGE_LIMIT
    changes["throttle"] = ",".join(draw(st.permutations(tuple(THROTTLES))))
    return dataclasses.replace(
        draw(measurements()), status=draw(st.sampled_from(tuple(STATUSES))), source_digest="f" * 64, **changes
    )
