"""The kernel families, the most specialised first."""

from __future__ import annotations

from ..family import Family
from .fma_fwd import FmaFwd
from .sm80_fwd import Sm80Fwd
from .sm90_fwd import Sm90Fwd

FAMILIES: dict[str, Family] = {each.name: each for each in (Sm90Fwd(), Sm80Fwd(), FmaFwd())}
