"""F6: calls after a kernel of other code has broken the CUDA context, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from libraries import Library

pytestmark = pytest.mark.gpu

BROKEN = """
import sys
import numpy
from flashtune.codegen.gpu.cuda import cupy
from flashtune import attention
host = numpy.ones((1, 24, 2, 64), numpy.float16)
if sys.argv[1] == "torch":
    import torch
    q = torch.from_numpy(host).cuda()
else:
    q = cupy.asarray(host)
attention(q, q, q)
bad = cupy.RawKernel('extern "C" __global__ void bad(int* p) { *p = 1; }', "bad")
bad((1,), (1,), (numpy.uint64(8),))
try:
    cupy.cuda.runtime.deviceSynchronize()
except cupy.cuda.runtime.CUDARuntimeError as error:
    print("broken:", error, flush=True)
for name, call in (("warm", lambda: attention(q, q, q)), ("first", lambda: attention(q[:, :9], q, q, scale=0.1))):
    try:
        call()
        print(name, "gave a result", flush=True)
    except Exception as error:
        print(name, type(error).__name__, "caused by", type(error.__cause__).__name__, error, flush=True)
import os
os._exit(0)
"""


def test_calls_after_the_context_is_lost(library: Library) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, library.name],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    broken, *said = done.stdout.splitlines()
    assert "cudaErrorIllegalAddress" in broken
    assert [each.split()[:2] for each in said] == [["warm", "ContextLost"], ["first", "ContextLost"]], said
    for each in said:
        assert "caused by NoneType" not in each
        assert "Start a new process" in each
        assert "graph" not in each
