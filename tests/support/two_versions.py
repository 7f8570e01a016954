"""Seconds of steps and decodes of two checkouts in turns: `python -m tests.support.two_versions OLD NEW --rounds 7`.

Each checkout has a process with SD 1.5's architecture and random weights in bf16, and one call runs at a time, so that
both meet the same load; the order is reversed every round. It reads the layout of today and that of commit 7d06e12.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter

AREAS = (0.05, 0.15, 0.25)
Calls = dict[str, Callable[[], object]]


def calls_of_7d06e12() -> Calls:
    """Step and decode of every mask, and a recorded dense step, in the layout of 7d06e12."""
    import torch
    from fisedit.heap import keep_freed_memory

    from fisedit import benchmark

    keep_freed_memory()
    pipe = benchmark.random_pipeline(torch.device("cpu"), torch.bfloat16)
    recipe = benchmark.Recipe(
        benchmark.PROMPTS[0], 7, "", 6, benchmark.GUIDANCE, 512, 512, benchmark.SchedulerName.DDIM
    )
    bench = benchmark._Bench(pipe, recipe, 1, benchmark._Progress(None, 1))
    bench.maps = bench._record(bench.latents)
    bench.picture, bench.decoder = benchmark.decode(pipe.vae, bench._final())
    calls: Calls = {"recorded step": lambda: bench._record(bench.latents)}
    for name, make in benchmark.MASKS.items():
        for area in AREAS:
            grid = make(area, 64)
            calls[f"{name} {area:.0%} step"] = bench._sparse_step(bench.engine.plan(grid, benchmark.STEP_GROWTH))
            calls[f"{name} {area:.0%} decode"] = lambda grid=grid: benchmark.decode_boxes(
                pipe.vae, bench._final(), grid, bench.decoder, bench.picture
            )
    return calls


def calls_of_today() -> Calls:
    """The same in today's layout."""
    from fisedit.bench import speed, workload
    from fisedit.bench.settings import SpeedSettings
    from fisedit.decoder.decode import decode_sparse
    from fisedit.machine.malloc import keep_freed_memory

    keep_freed_memory()
    settings = SpeedSettings(areas=AREAS, num_inference_steps=6, dtype="bf16")
    bench = speed._EditBenchmark(workload.load_workload(settings), None, None)
    calls: Calls = {"recorded step": bench._record}
    for name, area, grid in workload.masks_of_areas(AREAS, settings.size):
        calls[f"{name} {area:.0%} step"] = bench._sparse_step(grid)
        calls[f"{name} {area:.0%} decode"] = lambda grid=grid: decode_sparse(
            bench.pipe.vae, bench.random_latents, grid, bench.decoder
        )
    return calls


def serve() -> None:
    """Warm every call up, then time each call that stdin names."""
    import torch

    with torch.inference_mode():
        calls = calls_of_7d06e12() if find_spec("fisedit.benchmark") else calls_of_today()
        for call in calls.values():
            call()
        _tell("|".join(calls))
        for line in sys.stdin:
            began = perf_counter()
            calls[line.strip()]()
            _tell(str(perf_counter() - began))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Served:
    """A checkout's process.

    Args:
        checkout: folder of the checkout.
    """

    def __init__(self, checkout: Path) -> None:
        command, variables = [sys.executable, __file__, "--serve"], os.environ | {"PYTHONPATH": str(checkout)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=checkout, env=variables, stdin=pipe, stdout=pipe, text=True)
        self.names = self._process.stdout.readline().strip().split("|")

    def seconds(self, name: str) -> float:
        """Seconds of one call."""
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    """Print seconds of both, and the new ones over the old ones: median and range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    versions = [Served(asked.old.resolve()), Served(asked.new.resolve())]
    times = {name: ([], []) for name in versions[0].names}
    for turn in range(asked.rounds):
        for name, both in times.items():
            for i in (0, 1) if turn % 2 == 0 else (1, 0):
                both[i].append(versions[i].seconds(name))
    for version in versions:
        version.close()
    for name, both in times.items():
        ratios = [new / old for old, new in zip(*both, strict=True)]
        spread = f"{median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
        _tell(f"{name:20} {median(both[0]):7.3f} s {median(both[1]):7.3f} s {spread}")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
