"""Triton takes every kernel to machine code for an H200, on any machine; the interpreter would not notice."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program may have on compute capability 9.0."""

KERNELS = {"_gather", "_sums", "_linear", "_row", "_geglu", "_attend", "_cross"}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler is that of x86-64 machines")
def test_every_kernel_compiles_for_hopper(tmp_path):
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_for_hopper"],
        cwd=Path(__file__).resolve().parents[2],
        env=settings | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in made} >= KERNELS
    assert max(kernel["shared"] for kernel in made) <= SHARED_MEMORY
    assert all(kernel["waits"] for kernel in made)
    aligned = [kernel for kernel in made if kernel["kernel"] == "_gather" and kernel["ALIGNED"] and kernel["NORM"]]
    assert len(aligned) == 9
    assert all(kernel["wide"] and not kernel["narrow"] for kernel in aligned)  # what two tensors' rows easily lose
    shared = [kernel for kernel in made if kernel.get("PARTS")]
    assert {kernel["kernel"] for kernel in shared} == {"_attend", "_linear"}
    for kernel in shared:  # no interpreter has several programs at once
        assert kernel["counted"].startswith("global.gpu.acq_rel.add")
        assert kernel["written_first"] and kernel["read_after"]
