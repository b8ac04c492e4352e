"""How near chips are to each other."""

from __future__ import annotations

from typing import Any

import pytest

from flashtune.tuned_db.distance import chip_distance

KEY = "9.0a/{model}/{sms}sm/smem232448/l2-{l2}/{memory}gb"


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        ({"sms": 130}, {"sms": 114}),
        ({"memory": 96}, {"memory": 80}),
        ({"sms": 78}, {"sms": 132, "mig": "7g.141gb"}),
        ({"sms": 16, "mig": "1g.18gb"}, {"odd": True}),
    ],
    ids=["SMs", "memory", "a slice is far", "an unknown form is last"],
)
def test_nearness_of_chips(nearer: dict[str, Any], farther: dict[str, Any]) -> None:
    def key(changes: dict[str, Any]) -> str:
        if changes.get("odd"):
            return "9.0a/unheard-of"
        text = KEY.format(**({"model": "x", "sms": 132, "l2": 62914560, "memory": 141} | changes))
        return text + (f"/mig-{changes['mig']}" if "mig" in changes else "")

    here = key({})
    assert chip_distance(here, here) == (0, 0.0)
    assert chip_distance(here, key(nearer)) < chip_distance(here, key(farther))


def test_every_key_of_the_table_is_understood() -> None:
    from flashtune.codegen.gpu_table import GPUS

    assert all(chip_distance(each.key, each.key) == (0, 0.0) for each in GPUS.values())
