"""`python -m benchmarks.kernel_speed`: time gather-then-linear against one dense conv,
for `tuning.CROP_WASTE`.

Prints output rows, waste, and a ratio of times for SD 1.5's levels and masks from compact to ragged. The ratio is the
time of the dense conv over that of gather-then-linear: below 1 the dense conv is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F

from fisedit.machine.device import choose_device, choose_dtype
from fisedit.sparse_kernels import torch_backend
from fisedit.sparse_kernels.row_plan import KernelMap, make_row_plan

LEVELS = ((64, 320), (32, 640), (16, 1280), (8, 1280))
"""(side of the map, channels) of SD 1.5 at 512 pixels."""

EDGE_RATIOS = (0.12, 0.25, 0.4, 0.55, 0.75, 1.0)
DENSITIES = (1.0, 0.8, 0.6)
"""Shares of the side that a square mask takes, and of its cells that stay in it: 1 is a compact blob."""


def main() -> None:
    """Measure and print."""
    dtype = choose_dtype(None, choose_device("cpu"))
    print(f"{dtype}, {torch.get_num_threads()} threads, two guidance branches")
    print("side  channels  rows  waste  crop/gather")
    for side, channels in LEVELS:
        for edge in EDGE_RATIOS:
            for density in DENSITIES:
                kernel_map = _kernel_map(side, max(1, round(edge * side)), density)
                ratio = _ratio(kernel_map, channels, dtype)
                print(f"{side:4}  {channels:8}  {kernel_map.rows_out:4}  {kernel_map.waste:5.2f}  {ratio:11.2f}")


def _kernel_map(side: int, edge: int, density: float) -> KernelMap:
    grid, start = np.zeros((side, side), bool), (side - edge) // 2
    inside = np.random.default_rng(0).random((edge, edge)) < density
    inside[0, 0] = inside[-1, -1] = True
    grid[start : start + edge, start : start + edge] = inside
    return make_row_plan(grid, 1).levels[0].same


@torch.inference_mode()
def _ratio(kernel_map: KernelMap, channels: int, dtype: torch.dtype, repeats: int = 7) -> float:
    rows = torch.randn(2, kernel_map.rows_out + len(kernel_map.halo), channels).to(dtype)
    weight = torch.randn(channels, channels, 3, 3).to(dtype).to(memory_format=torch.channels_last)
    padded, bias = F.pad(rows, (0, 0, 0, 1)), torch.zeros(channels).to(dtype)
    times: dict[Callable[..., object], list[float]] = {torch_backend.cropped_conv: [], torch_backend.gathered_conv: []}
    for _ in range(repeats + 1):
        for form, seconds in times.items():
            start = perf_counter()
            form(padded, kernel_map, weight, bias)
            seconds.append(perf_counter() - start)
    crop, gather = (median(seconds[1:]) for seconds in times.values())
    return crop / gather


if __name__ == "__main__":
    main()
