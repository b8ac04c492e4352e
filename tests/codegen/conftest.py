from __future__ import annotations

import sys
from pathlib import Path

# What several test files start from: sm90_points.py, fake_runtime.py.
sys.path.append(str(Path(__file__).parent))
