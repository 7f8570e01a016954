"""`python -m benchmarks.triton_speed`: time Triton's kernels against torch's on CUDA, for `tuning.TRITON_ROWS`.

Prints Triton's time over torch's for SD 1.5's levels and rows of all items together. Each is captured in a CUDA graph:
below 1 Triton is faster. No figure is printed for a kernel whose result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from statistics import median

import torch
from torch import Tensor

from fisedit.machine.device import choose_device
from fisedit.runners.graph_capture import capture
from fisedit.sparse_kernels import torch_backend
from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.operands import QUANTISED_DTYPES, ConvEpilogue, quantise
from fisedit.sparse_kernels.triton import backend

LEVELS = ((64, 320), (32, 640), (16, 1280), (8, 1280))
"""(side of the map, channels) of SD 1.5 at 512 pixels."""

SHARES = (0.06, 0.25)
ITEMS = (2, 32)
"""Both branches of guidance of one edit, and of sixteen."""
TOLERANCE = 2e-2
REPEATS = 20

Call = Callable[[], Tensor]


def main() -> None:
    """Measure and print."""
    device = choose_device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, fp16")
    print("kernel           side  channels  rows  triton/torch")
    with torch.inference_mode(), torch.device(device):
        for side, channels in LEVELS:
            for share, items in product(SHARES, ITEMS):
                rows = max(16, round(share * side * side) // 16 * 16)
                for name, (by_torch, by_triton) in cases(rows, side, channels, items=items).items():
                    print(f"{name:15}  {side:4}  {channels:8}  {items * rows:5}  {ratio(by_torch, by_triton, device)}")


def cases(
    rows: int, side: int, channels: int, dtype: torch.dtype = torch.float16, items: int = 2
) -> dict[str, tuple[Call, Call]]:
    """Each kernel by torch and by Triton over the same random arguments, on torch's default device.

    Args:
        rows: active rows.
        side: The side of the map, in cells.
        channels: The channels of the map.
        dtype: The dtype of the arguments.
        items: The items in the batch, of two branches.

    Returns:
        Name -> the two calls.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    def both_backends(name: str, *arguments: object) -> tuple[Call, Call]:
        def call(kernels: object) -> Call:
            def run() -> Tensor:
                out = getattr(kernels, name)(*arguments)
                first: Tensor = out[0] if isinstance(out, tuple) else out
                return first

            return run

        return call(torch_backend), call(backend)

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
        "group_norm_affine": both_backends(
            "group_norm_affine", x, packed[..., :channels], statistics, placement.num_rows, width, gamma, gamma, 1e-5
        ),
        "norm_conv3x3": both_backends(
            "norm_conv3x3", x, halo, taps, weight, gamma, norm, ConvEpilogue(random(1, channels), x)
        ),
        "norm_linear": both_backends("norm_linear", x, wide[: 3 * channels], None, None, layer),
        "norm_geglu": both_backends("norm_geglu", x, wide, random(8 * channels), layer),
        "attention": both_backends("attention", *packed.chunk(3, -1), recorded, recorded, placement, 8),
        "over int8": both_backends(
            "attention", *packed.chunk(3, -1), int8_values, int8_values, placement, 8, (int8_scales, int8_scales)
        ),
        "over fp8": both_backends(
            "attention", *packed.chunk(3, -1), fp8_values, fp8_values, placement, 8, (fp8_scales, fp8_scales)
        ),
        "cross_attention": both_backends("cross_attention", x, layer, square, text, text, 8),
        "two to linear": both_backends(
            "norm_linear", (random(items, rows, 4 * channels), x), wide_input, gamma, None, None, x
        ),
        "linear": both_backends("norm_linear", x, square, gamma, None, None, x),
    }


def ratio(by_torch: Call, by_triton: Call, device: torch.device) -> str:
    """Triton's median time over torch's, or what is wrong with its result.

    Args:
        by_torch: the reference.
        by_triton: the kernel.
        device: The device whose events are read.
    """
    expected, actual = by_torch().float(), by_triton().float()
    error = float((actual - expected).norm() / expected.norm())
    if not error <= TOLERANCE:
        return f"wrong by {error:.1e}"
    return f"{seconds(by_triton, device) / seconds(by_torch, device):.2f}"


def seconds(call: Call, device: torch.device) -> float:
    """Median seconds of a captured call, by device events."""
    captured, times = capture(lambda: {"out": call()}, device), []
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
