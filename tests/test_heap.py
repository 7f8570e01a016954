"""Freed memory stays, where the C library is glibc; elsewhere nothing happens."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

GLIBC = platform.libc_ver()[0] == "glibc"

PROGRAM = """
import resource, sys
from fisedit.heap import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
import torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([faults() for _ in range(20)][-1])
"""


@pytest.mark.skipif(not GLIBC, reason="only glibc's allocator can be told; this is another C library")
def test_a_freed_block_is_used_again():
    """64 MB are 16,384 pages: touched anew every time, or never again once the heap is large enough."""
    faults = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    pages = (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults["keep"] < pages / 10 and faults["leave"] > pages / 2
