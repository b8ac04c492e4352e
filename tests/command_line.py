"""The command line in this process, as tests call it."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from flashtune.cli.main import main


def run(*words: str | Path, code: int = 0) -> Result:
    """`flashtune` with ``words``, which must end with ``code`` and without a traceback."""
    result = CliRunner().invoke(main, [str(each) for each in words])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result
