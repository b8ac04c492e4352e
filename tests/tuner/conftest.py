from __future__ import annotations

import sys
from pathlib import Path

# What stands in for devices and compilers must be found by worker processes too, which inherit this path.
sys.path.append(str(Path(__file__).parent))
