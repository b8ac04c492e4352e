"""What the choice among tied configs costs: how much slower than the fastest of its final each winner is.

    python benchmarks/ties.py --out benchmarks/results/ties_h200.json

From the finals of one `flashtune tune` over 59 problems on an H200 (the presets grid, wide and llm), which are kept;
needs no GPU. Once by the policy of `tuned_db/policy/winners.py`, once with ties by plain overlap of intervals, as
before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

from environment import environment
from model_check import RESULTS

from flashtune.tuned_db.exchange.export_file import read_export
from flashtune.tuned_db.policy.ranked import ALIKE, Ranked
from flashtune.tuned_db.policy.winners import fastest, rank
from flashtune.tuned_db.records.measurement import Measurement

TUNED = RESULTS / "tune_h200.jsonl.gz"
"""All rows of that run."""


def overlaps(self: Ranked, leader: Ranked) -> bool:
    """Plain overlap, beside which only `ALIKE` counts."""
    assert self.ratio is not None
    assert leader.ratio is not None
    low = self.ratio if self.low is None else self.low
    high = leader.ratio if leader.high is None else leader.high
    return low <= high or self.ratio <= leader.ratio * (1 + ALIKE)


def read_finals() -> dict[str, list[Measurement]]:
    """Rows by problem."""
    found = defaultdict(list)
    for row in read_export(TUNED).measurements:
        if row.stage == "final":
            found[row.problem.key].append(row)
    return found


def losses(finals: dict[str, list[Measurement]]) -> dict[str, float]:
    """Ratio of the winner's time to that of the fastest, less 1, in per cent, by problem."""
    found = {}
    for key, rows in finals.items():
        ranking = rank(rows)
        winner, best = ranking[0].ratio, fastest(ranking).ratio
        assert winner is not None
        assert best is not None
        found[key] = round(100 * (winner / best - 1), 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    finals = read_finals()
    found = {"policy": losses(finals)}
    with patch.object(Ranked, "tied_with", overlaps):
        found["plain overlap"] = losses(finals)
    summary = {
        name: {"mean": round(statistics.mean(lost.values()), 3), "most": max(lost.values())}
        for name, lost in found.items()
    }
    print(summary)
    if options.out:
        result = {"what": __doc__, "environment": environment(), "summary": summary, "loss in %": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
