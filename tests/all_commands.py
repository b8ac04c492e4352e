"""Commands of `flashtune` that print paths, or what a database holds."""

from __future__ import annotations

from pathlib import Path

from terminal import SOURCES

PROBLEM = ["--seqlen", "256", "--heads", "4", "--head-dim", "64", "--dtype", "float16"]


def commands(database: Path) -> dict[str, list[str]]:
    """Each command that reads, changes or names ``database``, and those that print a setting. It is tuned for the
    H200."""
    beside = {
        name: str(database.with_name(name)) for name in ("out.jsonl", "copy.db", "studies.db", "new.db", "imported.db")
    }
    shipped = str(SOURCES / "flashtune" / "tuned_db" / "bundled" / "h200.jsonl")
    on = ["--db", str(database)]
    return {
        "info": ["info"],
        "list": ["list", *on],
        "explain": ["explain", "--gpu", "h200", *PROBLEM, *on],
        "explain --json": ["explain", "--gpu", "h200", *PROBLEM, *on, "--json"],
        "source": ["source", "--gpu", "h200", *PROBLEM, *on],
        "export-optuna": ["export-optuna", beside["studies.db"], "--gpu", "h200", *on],
        "db info": ["db", "info", *on],
        "db check": ["db", "check", "--gpu", "h200", *on],
        "db digest": ["db", "digest", "--gpu", "h200", *on],
        "db history": ["db", "history", "--gpu", "h200", *PROBLEM, *on],
        "db gc": ["db", "gc", "--dry-run", *on],
        "db upgrade": ["db", "upgrade", *on],
        "db backup": ["db", "backup", beside["copy.db"], *on],
        "db export": ["db", "export", beside["out.jsonl"], *on],
        "db diff": ["db", "diff", str(database), beside["copy.db"]],
        "db import": ["db", "import", shipped, "--db", beside["imported.db"]],
        "db merge": ["db", "merge", str(database), "--db", beside["new.db"]],
        "db log": ["db", "log", *on],
        "tune": ["tune", "--gpu", "h200", "--mode", "predict", *PROBLEM, "--budget", "2", *on],
    }


NAMELESS = ("source", "db digest", "db gc", "explain", "explain --json")
"""Those that print neither the path nor a name."""
