"""`python -m benchmarks.triton_speed`: time Triton's kernels and xFormers' against torch's, for `tuning.TRITON_ROWS`.

Prints their times over those of torch for SD 1.5's levels and rows of all items together. Torch's attention is its own
fused one. Each is captured in a CUDA graph: below 1 it is faster than torch's. No figure is printed for a kernel whose
result is wrong beside the reference's. On a CPU one small case is rehearsed by torch's kernels and xFormers'.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fisedit.errors import InputError
from fisedit.machine.device import choose_device
from fisedit.runners.graph_capture import capture
from fisedit.sparse_kernels import ops, reference
from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.operands import QUANTISED_DTYPES, ConvEpilogue, quantise

LEVELS = ((64, 320), (32, 640), (16, 1280), (8, 1280))
"""(side of the map, channels) of SD 1.5 at 512 pixels."""

SHARES = (0.06, 0.25)
ITEMS = (2, 32)
"""Both branches of guidance of one edit, and of sixteen."""
KERNELS = {"over int8": "attention", "over fp8": "attention", "two to linear": "norm_linear", "linear": "norm_linear"}
"""Case -> its kernel, where the name is another."""

TOLERANCE = 2e-2
REPEATS = 20

Call = Callable[[], Tensor]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triton_speed", description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = choose_device(parser.parse_args().device)
    on_gpu = device.type == "cuda"
    print(f"{torch.cuda.get_device_name(device)}, fp16" if on_gpu else "a rehearsal on a CPU, fp32")
    found = backends("triton", "xformers") if on_gpu else backends("xformers")
    levels = list(product(LEVELS, SHARES, ITEMS)) if on_gpu else [(LEVELS[-1], SHARES[0], ITEMS[0])]
    print(f"kernel           side  channels  rows  {'  '.join(f'{name}/torch' for name in found)}")
    with torch.inference_mode(), torch.device(device):
        for (side, channels), share, items in levels:
            rows = max(16, round(share * side * side) // 16 * 16)
            dtype = torch.float16 if on_gpu else torch.float32
            for name, make in cases(rows, side, channels, dtype, items).items():
                ratios = "  ".join(f"{text:>14}" for text in compared(name, make, found, device))
                print(f"{name:15}  {side:4}  {channels:8}  {items * rows:5}  {ratios}", flush=True)


def backends(*names: str) -> dict[str, ModuleType]:
    """The backends that can run here; of others the reason is printed.

    Args:
        names: names of `ops.use`.
    """
    found = {}
    for name in names:
        try:
            with ops.use(name):
                found[name] = ops._kernels("attention", torch.empty(1, 1, 1))  # noqa: SLF001
        except (InputError, ImportError, OSError) as error:
            print(f"{name} was left out: {error}", flush=True)
    return found


def compared(
    name: str, make: Callable[[ModuleType], Call], found: dict[str, ModuleType], device: torch.device
) -> Iterator[str]:
    """Yield the ratios of a kernel for every backend; torch's own kernels in one have none.

    Args:
        name: The name of the case.
        make: gives the call by a backend.
        found: the backends.
        device: The device whose events are read.
    """
    expected, by_torch = make(reference)(), make(ops.BACKENDS["fast"])
    for backend in found.values():
        try:
            yield ratio(expected, by_torch, make(backend), device) if is_own(name, backend) else "-"
        except NotImplementedError:  # xFormers has no operator for such tensors
            yield "cannot run"


def is_own(name: str, backend: ModuleType) -> bool:
    """Return whether a backend has a kernel of its own for a case, and not torch's.

    Args:
        name: The name of the case.
        backend: The backend.
    """
    kernel: Any = getattr(backend, KERNELS.get(name, name))
    return bool(kernel.__module__ != ops.BACKENDS["fast"].__name__)


def cases(
    rows: int, side: int, channels: int, dtype: torch.dtype = torch.float16, items: int = 2
) -> dict[str, Callable[[ModuleType], Call]]:
    """Each kernel by any backend over the same random arguments, on torch's default device.

    Args:
        rows: active rows.
        side: The side of the map, in cells.
        channels: The channels of the map.
        dtype: The dtype of the arguments.
        items: The items in the batch, of two branches.

    Returns:
        Name -> the call, for a backend.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    def by_any(name: str, *arguments: object) -> Callable[[ModuleType], Call]:
        def call(kernels: ModuleType) -> Call:
            def run() -> Tensor:
                out = getattr(kernels, name)(*arguments)
                first: Tensor = out[0] if isinstance(out, tuple) else out
                return first

            return run

        return call

    x, halo = random(items, rows, channels), random(items, max(16, rows // 2), channels)
    gamma, square = random(channels), random(channels, channels) * channels**-0.5
    layer, wide = (gamma, gamma, 1e-5), random(8 * channels, channels) * channels**-0.5
    weight = (random(channels, channels, 3, 3) * (9 * channels) ** -0.5).to(memory_format=torch.channels_last)
    taps = torch.randint(0, rows + halo.shape[1] + 1, (items, rows, 9), dtype=torch.int32)
    norm, packed = torch.randn(items, 2, channels), random(items, rows, 3 * channels)
    recorded, text = random(2, side * side, channels), random(items, 77, channels)
    (int8_values, int8_scales), (fp8_values, fp8_scales) = (
        quantise(recorded, 8, kind) for kind in QUANTISED_DTYPES.values()
    )
    wide_input = random(channels, 5 * channels) * channels**-0.5
    placement = RowPlacement.empty(items, rows, side * side, x.device)
    placement.positions[:] = torch.arange(rows)
    placement.active_mask[:, :rows] = True
    placement.num_rows.fill_(rows)
    width = side * side * channels // 32  # elements of a group
    statistics = torch.tensor([0.0, 2.0 * width], dtype=torch.float64).expand(2, 32, 2)
    return {
        "group_norm_affine": by_any(
            "group_norm_affine", x, packed[..., :channels], statistics, placement.num_rows, width, gamma, gamma, 1e-5
        ),
        "norm_conv3x3": by_any(
            "norm_conv3x3", x, halo, taps, weight, gamma, norm, ConvEpilogue(random(1, channels), x)
        ),
        "norm_linear": by_any("norm_linear", x, wide[: 3 * channels], None, None, layer),
        "norm_geglu": by_any("norm_geglu", x, wide, random(8 * channels), layer),
        "attention": by_any("attention", *packed.chunk(3, -1), recorded, recorded, placement, 8),
        "over int8": by_any(
            "attention", *packed.chunk(3, -1), int8_values, int8_values, placement, 8, (int8_scales, int8_scales)
        ),
        "over fp8": by_any(
            "attention", *packed.chunk(3, -1), fp8_values, fp8_values, placement, 8, (fp8_scales, fp8_scales)
        ),
        "cross_attention": by_any("cross_attention", x, layer, square, text, text, 8),
        "two to linear": by_any(
            "norm_linear", (random(items, rows, 4 * channels), x), wide_input, gamma, None, None, x
        ),
        "linear": by_any("norm_linear", x, square, gamma, None, None, x),
    }


def ratio(expected: Tensor, by_torch: Call, by_other: Call, device: torch.device) -> str:
    """A kernel's median time over torch's, or what is wrong with its result.

    Args:
        expected: The result of the reference.
        by_torch: torch's kernel.
        by_other: the kernel.
        device: The device whose events are read.
    """
    error = float((by_other().float() - expected.float()).norm() / expected.float().norm())
    if not error <= TOLERANCE:
        return f"wrong by {error:.1e}"
    return f"{seconds(by_other, device) / seconds(by_torch, device):.2f}"


def seconds(call: Call, device: torch.device) -> float:
    """Median seconds of a captured call, by device events."""
    captured, times = capture(lambda: {"out": call()}, device), []
    if device.type != "cuda":
        start = perf_counter()
        captured.replay()
        return perf_counter() - start
    for _ in range(REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000)
    return median(times[3:])


if __name__ == "__main__":
    main()
