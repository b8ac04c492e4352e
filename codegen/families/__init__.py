"""The kernel families, preferred first."""

from __future__ import annotations

from ..family import Family
from .fma_fwd import FmaFwd
from .sm80_fwd import Sm80Fwd

FAMILIES: dict[str, Family] = {each.name: each for each in (Sm80Fwd(), FmaFwd())}
