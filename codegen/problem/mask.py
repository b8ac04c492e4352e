"""Which keys a query sees: the geometry of a mask, in one place for all who ask.

The keys that one query sees are an interval, and neither end of it falls from a query to the next. So what several
queries in a row see follows from the first and the last of them. `templates/blocks/mask.cuh` says the same on the
device; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing flashtune is quick
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]
    Keys = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of ``seqlen_q`` queries over ``seqlen_k`` keys. Causal is aligned bottom-right.

    Questions are about many queries, or tiles of queries, at once. Answers are arrays: the first key of each, and one
    past the last; where there is no key both are the same.
    """

    seqlen_q: int
    seqlen_k: int
    causal: bool = False

    def seen(self, rows: Rows) -> Keys:
        """Keys that each of the queries ``rows`` sees."""
        import numpy as np

        last: Any = rows + (self.seqlen_k - self.seqlen_q) if self.causal else self.seqlen_k - 1
        return np.zeros_like(rows), np.zeros_like(rows) + np.clip(last + 1, 0, self.seqlen_k)

    def seen_by_any(self, begins: Rows, ends: Rows) -> Keys:
        """The least interval that holds each key which any query of the tile [begin, end) sees."""
        return self.seen(begins)[0], self.seen(self._last(ends))[1]

    def seen_by_all(self, begins: Rows, ends: Rows) -> Keys:
        """Keys that each query of the tile [begin, end) sees."""
        import numpy as np

        first, end = self.seen(self._last(ends))[0], self.seen(begins)[1]
        return first, np.maximum(first, end)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that it leaves visible."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_k
        return _sum_of_clipped(1 + self.seqlen_k - self.seqlen_q, self.seqlen_q, self.seqlen_k)

    def _last(self, ends: Rows) -> Rows:
        """The last query of tiles, which may go on past the last that there is."""
        import numpy as np

        return np.minimum(ends, self.seqlen_q) - 1


def _sum_of_clipped(first: int, count: int, most: int) -> int:
    """The sum of ``count`` whole numbers from ``first`` on; what is negative counts as 0, what is more as ``most``."""
    below = _clipped(-first, count)
    rising = _clipped(most - (first + below), count - below)
    return rising * (2 * (first + below) + rising - 1) // 2 + (count - below - rising) * most


def _clipped(value: int, most: int) -> int:
    return max(0, min(most, value))
