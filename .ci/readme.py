"""Prints the Python examples of a Markdown file that run without a GPU: usage readme.py README.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

SKIP = "<!-- needs a GPU -->"
_BLOCK = re.compile(r"^(?P<above>[^\n]*\n\n?)^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(markdown: str) -> list[str]:
    """The ``python`` blocks in order, but those right under a line ``<!-- needs a GPU -->``."""
    return [match["code"] for match in _BLOCK.finditer(markdown) if match["above"].strip() != SKIP]


if __name__ == "__main__":
    found = examples(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if not found:
        raise SystemExit(f"{sys.argv[1]} has no Python example that runs without a GPU")
    print("\n".join(found), end="")
