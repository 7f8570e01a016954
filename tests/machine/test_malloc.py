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
from fisedit.machine.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
import torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([faults() for _ in range(20)][-1])
"""

THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from fisedit.machine.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
import psutil
import torch
together = Barrier(8)
def fill(turn):
    together.wait()
    for number in range(8):
        blocks = [torch.ones(1 << 19, dtype=torch.uint8) for _ in range(64)] if number == turn else None
        del blocks
        together.wait()
with ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda turn: together.wait(), range(8)))
    before = psutil.Process().memory_info().rss
    list(pool.map(fill, range(8)))
    print(psutil.Process().memory_info().rss - before >> 20)
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


@pytest.mark.skipif(not GLIBC, reason="as above")
def test_threads_use_again_what_others_freed():
    """Eight threads take 32 MB and free them, one after another: one heap grows by that and by gaps, up to 86 MB
    in all, eight would by 256."""
    done = subprocess.run([sys.executable, "-c", THREADS, "keep"], capture_output=True, text=True, check=True)
    assert 16 <= int(done.stdout) <= 128
