"""Array libraries and a device without a GPU: a test that asks for `fakes` runs with each of two libraries, one that
asks for `library` with each on the rules of CUDA."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flashtune.call import arrays

sys.path.append(str(Path(__file__).parent))  # fake_arrays.py, fake_layer.py, fake_calls.py, fake_cuda.py
import fake_arrays
from fake_arrays import Fakes

if TYPE_CHECKING:
    from fake_cuda import FakeCuda


@pytest.fixture(params=["torch", "cupy"])
def fakes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Each fake library in turn, with an empty tuning database."""
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    made = Fakes(request.param)
    arrays.register(made.kind)
    yield made
    arrays.unregister(made.kind)


@pytest.fixture(params=["torch", "cupy"])
def library(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Each fake library on the real device layer and a fake CUDA, of which it asks for all memory anew."""
    pytest.importorskip("flashtune.codegen.launch", reason="needs CuPy", exc_type=ImportError)
    from fake_cuda import FakeCuda

    from flashtune.codegen.gpu.cuda import runtime

    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    cuda = FakeCuda(monkeypatch)
    allocate = fake_arrays.allocate

    def asked(shape: tuple[int, ...], dtype: Any) -> Any:
        try:
            cuda.unsafe("malloc")
        except runtime.CUDARuntimeError as error:
            raise (fake_arrays.FakeAcceleratorError(error.status) if request.param == "torch" else error) from None
        return allocate(shape, dtype)

    monkeypatch.setattr(fake_arrays, "allocate", asked)
    made = Fakes(request.param, cuda.layer)
    arrays.register(made.kind)
    yield made
    arrays.unregister(made.kind)


@pytest.fixture
def cuda(library: Fakes) -> FakeCuda:
    """The one under ``library``."""
    found: FakeCuda = library.layer.cuda
    return found
