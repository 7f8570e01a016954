"""`python -m benchmarks.cuda_profile`: which kernels a captured sparse step's time goes to on a GPU.

Runs SD 1.5's architecture with random weights and one square mask, by torch's kernels, by Triton's, or "compiled". The
last are torch's as Inductor compiles them, which is a minute's work for one shape. Prints for each number of edits
and area the seconds of a step by device events, the sum of its kernels', and the costliest kernels.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx

from fisedit.bench.cuda_speed import BACKENDS, GraphBenchmark
from fisedit.bench.dense_pipelines import DensePipelines
from fisedit.bench.dense_search import DenseSearch, DenseVariant
from fisedit.bench.settings import SpeedSettings
from fisedit.bench.workload import STEP_DILATION, load_workload, square_mask
from fisedit.runners.cuda_graphs import GraphExecutor
from fisedit.runners.graph_capture import Outputs
from fisedit.runners.static_rows import Buffers
from fisedit.sparse_kernels import ops, tuning
from fisedit.values import LATENT_FACTOR

SHOWN = 14
"""Kernels printed of each step; the rest are summed."""

COMPILED = "compiled"

NAME_WIDTH = 100
"""Characters of a kernel's name that are printed."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_profile", description=__doc__)
    parser.add_argument("--areas", type=float, nargs="+", default=[0.05, 0.25], help="of the masks, each in (0, 1]")
    parser.add_argument("--edits", type=int, nargs="+", default=[1, 16], help="in one batch")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="a model instead of SD 1.5's architecture with random weights")
    parser.add_argument("--size", type=int, default=512, help="side of the picture, in pixels")
    chosen = parser.parse_args()
    settings = SpeedSettings(
        model=chosen.model, device=chosen.device, size=chosen.size, num_inference_steps=4, repeats=2, compiled=False
    )
    workload = load_workload(settings)
    variant = DenseVariant(str(workload.dtype).replace("torch.float16", "fp16"), channels_last=True, compiled=False)
    with torch.inference_mode():
        dense = DensePipelines(workload.pipe, workload.config, compiled=False)
        benchmark = GraphBenchmark(workload, dense, DenseSearch(variant, {variant: [0.0]}, {}), 3, plain=False)
        for area in chosen.areas:
            for edits in chosen.edits:
                for backend in chosen.backends:
                    with ops.use("fast" if backend == COMPILED else backend):
                        print_step(benchmark, area, edits, backend)


class CompiledExecutor(GraphExecutor):
    """Captured graphs of torch's kernels as Inductor compiles them, for one set of buffers."""

    _compiled: Any = None

    def _outputs(self, buffers: Buffers) -> Outputs:
        if self._compiled is None:
            with torch.inference_mode(mode=False), torch.no_grad(), mock.patch.object(tuning, "TRITON_ROWS", {}):
                self._names = list(super()._outputs(buffers))
                eager = super()._outputs
                traced = make_fx(lambda: tuple(eager(buffers).values()))()
                for node in traced.graph.find_nodes(op="get_attr"):  # numbers that the trace made tensors on the host
                    setattr(traced, node.target, getattr(traced, node.target).to(buffers.latents.device))
                self._compiled = compile_fx(traced, [])
        return dict(zip(self._names, self._compiled(), strict=True))


def print_step(benchmark: GraphBenchmark, area: float, edits: int, backend: str) -> None:
    """Time one captured step and list its kernels.

    Args:
        benchmark: The benchmark whose source is edited.
        area: The share of the picture in the square mask, in (0, 1].
        edits: in the batch, each in another place.
        backend: a name of `ops.use`, which is in use; or "compiled".
    """
    side, middle = benchmark.config.height // LATENT_FACTOR, benchmark.middle
    grids = [np.roll(square_mask(area, side), (4 * e, 7 * e), (0, 1)) for e in range(edits)]
    plans = [benchmark.engine.row_plan(grid, STEP_DILATION) for grid in grids]
    executor = CompiledExecutor if backend == COMPILED else GraphExecutor
    edit = executor(benchmark.engine.executor).begin(
        plans, {middle: benchmark.source.features[middle]}, benchmark.text.repeated(edits)
    )
    latents = torch.cat([benchmark.source.latents[middle]] * benchmark.engine.batch(benchmark.config))
    step = partial(edit.step, middle, latents.repeat_interleave(edits, 0), benchmark.times[middle])
    seconds, kernels = median(benchmark.turns({"step": step})["step"]), kernel_times(step)
    count, total = sum(len(times) for times in kernels.values()), sum(map(sum, kernels.values()))
    rows = "/".join(str(rows) for rows in plans[0].rows)
    title = f"{backend}, {edits} edits of {area:.0%} (rows {rows})"
    print(f"== {title}: {seconds * 1e3:.3f} ms a step, {count} kernels of {total:.3f} ms")
    by_time = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    for name, times in by_time[:SHOWN]:
        print(f"  {sum(times):8.3f} ms  {len(times):4} x  longest {max(times):.4f}  {name[:NAME_WIDTH]}")
    print(f"  {sum(sum(times) for _, times in by_time[SHOWN:]):8.3f} ms  in {len(by_time[SHOWN:])} others", flush=True)


def kernel_times(call: Callable[[], object]) -> dict[str, list[float]]:
    """Milliseconds of every kernel and copy that a call launches, by name; nothing on a CPU.

    Args:
        call: what is profiled.
    """
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, list[float]] = defaultdict(list)
    if not torch.cuda.is_available():
        return found
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            found[event.name].append(event.device_time_total / 1000)
    return found


if __name__ == "__main__":
    main()
