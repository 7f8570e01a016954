"""The machine that this process runs on: CPU, GPU, cores, threads, memory. Measures nothing."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from functools import cache
from math import ceil
from pathlib import Path

import torch

from fisedit.machine.groups import cpu_limit, memory_left

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""CPU flags that decide how fast products are, by precision."""


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that decide how long a layer takes.

    Args:
        cpu: the model.
        gpu: the name of the GPU that computes, "" where the CPU does.
        cores: The number of cores that this process may use.
        threads: The number of torch's threads.
        torch: version.
    """

    cpu: str
    gpu: str
    cores: int
    threads: int
    torch: str

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self)


def this_machine(device: torch.device) -> Machine:
    """The machine as it is now.

    Args:
        device: The device that computes.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Machine(cpu_model()[0], gpu, num_cores(), torch.get_num_threads(), torch.__version__)


def num_cores() -> int:
    """Cores that this process may use; in a container, at most its share of CPU time, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cpu_limit()
    return cores if limit is None else min(cores, max(1, ceil(limit)))


@cache
def cpu_model(path: Path = Path("/proc/cpuinfo")) -> tuple[str, tuple[str, ...]]:
    """The CPU's model, and those of its features that decide how fast products are.

    Args:
        path: Linux's description of the CPUs; elsewhere `platform` names the CPU.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine(), ()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    flags_found = set(flags[1].split()) if flags else set()
    return name[1] if name else platform.machine(), tuple(feature for feature in _FEATURES if feature in flags_found)


def available_bytes(path: Path = Path("/proc/meminfo")) -> int:
    """Memory that a process may still take without swapping, or without passing its container's limit.

    Args:
        path: Linux's description of the memory; all of the machine's counts where there is none.
    """
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    free = int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = memory_left()
    return free if left is None else min(free, left)


def free_bytes(device: torch.device) -> int:
    """Memory that a process may still take: of a GPU, or of the machine for another device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_bytes()


WORKING_BYTES = 1 << 30
"""Memory that a step and a decode of 512x512 pixels take beside weights and records, in bf16 about .9 GB."""


def recordable_bytes(device: torch.device) -> int:
    """Memory that records take by default at most: half of what is free beyond `WORKING_BYTES`."""
    return max(0, free_bytes(device) - WORKING_BYTES) // 2
