"""The public names: all there, all documented, nothing else."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest

import flashtune


def test_all_is_sorted_and_complete() -> None:
    assert flashtune.__all__ == sorted(flashtune.__all__)
    assert set(flashtune._HOMES) | {"__version__", "errors"} == set(flashtune.__all__)
    assert set(flashtune.__all__) <= set(dir(flashtune))


@pytest.mark.parametrize("name", [name for name in flashtune.__all__ if name != "__version__"])
def test_each_name_is_there_and_documented(name: str) -> None:
    found = getattr(flashtune, name)
    assert inspect.getdoc(found), f"flashtune.{name} has no docstring"
    assert getattr(flashtune, name) is found


def test_version_is_that_of_the_installed_package() -> None:
    try:
        installed = importlib.metadata.version("flashtune")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashtune runs from a checkout and is not installed: it has no version then")
    assert flashtune.__version__ == installed


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'flashtune' has no attribute 'flash'"):
        flashtune.flash  # noqa: B018
