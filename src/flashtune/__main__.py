"""`python -m flashtune`."""

from .cli import main

main(prog_name="flashtune")
