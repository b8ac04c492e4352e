"""`flashtune export-optuna`: stored measurements as Optuna studies."""

from __future__ import annotations

from pathlib import Path

import click

from flashtune.cli.common.options import FileName, database_option, existing_database
from flashtune.files import shown_path


@click.command(name="export-optuna")
@click.argument("file", type=FileName())
@click.option("--gpu", help="Only what was measured on this GPU, such as h100. [default: all]")
@database_option
def export_optuna(file: Path, gpu: str | None, database: Path | None) -> None:
    """Write stored measurements to FILE as Optuna studies.

    FILE is a new SQLite storage of Optuna, with one study per problem, GPU and kernel family, and one trial per
    measurement. It is for looking at a search: the tuner never reads it. A file that exists is never overwritten.
    Predictions are not written.

    \b
    Examples:
      flashtune export-optuna studies.db
      flashtune export-optuna studies.db --gpu h200 --db team.db
      pip install optuna-dashboard && optuna-dashboard sqlite:///studies.db
    """
    from flashtune.codegen.gpu.table import gpu_by_alias
    from flashtune.tuner.commands.optuna_export import export_studies

    key = gpu_by_alias(gpu).key if gpu is not None else None
    path = existing_database(database)

    def show(name: str, number: int, total: int) -> None:
        click.echo(f"{number} of {total}: {name}", err=True)

    written = export_studies(path, file, gpu_key=key, progress=show)
    trials = sum(each.trials for each in written)
    click.echo(f"{len(written)} studies with {trials} trials written to {shown_path(file)}")
    click.echo(f"Look at them: optuna-dashboard sqlite:///{shown_path(file)}")
