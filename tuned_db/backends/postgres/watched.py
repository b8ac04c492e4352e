"""A connection of psycopg's that ends when its server says nothing for long, and at once on Ctrl-C.

TCP notices a machine that is gone, not a server that is there and frozen: its kernel goes on answering. The module
imports psycopg, so it is imported where a server is used.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import psycopg
from psycopg import waiting
from psycopg.abc import RV, PQGen

LOOK_SECONDS = 0.1
"""How often a connection that waits looks at the time, and Python at Ctrl-C."""
CANCEL_SECONDS = 2.0
"""For the server to take back what it was asked, after Ctrl-C. Else it ends at the time limit of a statement."""


class WatchedConnection(psycopg.Connection[Any]):
    """Raises `psycopg.OperationalError` when there was nothing from the server for ``patience`` seconds."""

    patience = 60.0

    def __repr__(self) -> str:
        """Without the user that psycopg names, for logs: it may be a password, see `address.py`."""
        return f"<{type(self).__name__}{' (closed)' if self.closed else ''}>"

    def wait(self, gen: PQGen[RV], interval: float = LOOK_SECONDS, *others: Any, **named: Any) -> RV:
        """What psycopg waits with, for all that a connection does."""
        try:
            return waiting.wait_selector(self._watched(gen), self.pgconn.socket, interval, *others, **named)
        except KeyboardInterrupt:
            if psycopg.capabilities.has_cancel_safe():  # an older libpq may wait for ever, and not for Ctrl-C
                with contextlib.suppress(Exception):  # as where the server is what hangs
                    self.cancel_safe(timeout=CANCEL_SECONDS)
            self.pgconn.finish()
            raise

    def _watched(self, gen: PQGen[RV]) -> PQGen[RV]:
        """``gen``, ended after too much silence; while this process was stopped itself (Ctrl-Z), there is none."""
        silence, looked = 0.0, time.monotonic()
        try:
            awaited = next(gen)
            while True:
                ready = yield awaited
                now = time.monotonic()
                silence = 0.0 if ready else silence + min(now - looked, 10 * LOOK_SECONDS)
                looked = now
                if silence > self.patience:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server has said nothing for {self.patience:g} s")
                awaited = gen.send(ready)
        except StopIteration as end:
            result: RV = end.value
            return result
