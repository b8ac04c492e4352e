"""Makes the rows that ship of exports of whole tuning runs: `tuned_db/bundled/h200.jsonl`.

    python benchmarks/bundle.py benchmarks/results/tune_h200.jsonl.gz benchmarks/results/tune_h200_models.jsonl.gz \\
        --out tuned_db/bundled/h200.jsonl

Per problem these are the winner, what is next and tied with it, and the default that they were measured against. Needs
no GPU; the same exports give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flashtune.tuned_db.exchange.export_file import read_export, write_bundled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", type=Path, help="exports of tuning databases (.jsonl, .jsonl.gz)")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    rows = [row for path in options.exports for row in read_export(path).measurements]
    digest = write_bundled(rows, options.out).digest
    kept = read_export(options.out).measurements
    print(f"{options.out}: {len(kept)} of {len(rows)} rows, {len({each.problem for each in kept})} problems, {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
