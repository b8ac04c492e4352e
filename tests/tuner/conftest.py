from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).with_name("fakes.py")
_SPEC = importlib.util.spec_from_file_location("tuner_fakes", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules["tuner_fakes"] = _MODULE
_SPEC.loader.exec_module(_MODULE)
