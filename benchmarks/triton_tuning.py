"""`python -m benchmarks.triton_tuning`: launch shapes of Triton's kernels, tried at a sparse step's shapes.

Kernels run at the shapes of a step of Stable Diffusion 1.5 over a small mask. Weights change from call to call, as
those of a step are in no cache. Prints for every case the fastest launch shapes, the one that `triton.launch` chooses,
and torch's time, in microseconds; `--output` keeps all of them. Needs CUDA and triton.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, product
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fisedit.sparse_kernels import torch_backend
from fisedit.sparse_kernels.buckets import RowPlacement
from fisedit.sparse_kernels.triton import attention, feedforward, launch, linear, norm
from fisedit.sparse_kernels.triton.launch import AttentionTile, SplitK, SumsTile, Tile, cdiv

ITEMS = 2
LEVELS = ((256, 320, 64), (64, 640, 32), (16, 1280, 16))
"""Padded rows of each item, channels and side of the map, at 5 % of a picture of 512 pixels."""

SHARED_MEMORY = 200 * 1024
COLD_BYTES = 150 << 20
"""The bytes of all weights that a timing reads in turn: more than an H200's L2 cache."""

MAX_COPIES = 48

TOLERANCE = 1e-2
"""The largest error of an output beside torch's, relative."""

Call = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    """A kernel at the shapes of one layer.

    Args:
        name: The name of the layer.
        rows: The rows of each item.
        channels: The channels of the rows, K of a GEMM.
        width: The width of the output; positions of an attention's map.
        flags: what the kernel does beside.
    """

    name: str
    rows: int
    channels: int
    width: int
    flags: tuple[str, ...] = ()

    @property
    def beside(self) -> int:
        """Channels of the first of two tensors side by side; 0 for one tensor."""
        if "pair" not in self.flags:
            return 0
        return self.channels // 2 if self.channels == 2 * self.width else self.channels * 4 // 5


def cases() -> Iterator[Case]:
    """Yield the cases of one sparse step."""
    for rows, c, side in LEVELS:
        yield Case("linear", rows, c, c, ("norm",))
        yield Case("linear", rows, c, 3 * c, ("layer",))
        yield Case("linear", rows, c, c, ("residual",))
        yield Case("linear", rows, 5 * c, c, ("pair", "residual"))
        yield Case("linear", rows, 2 * c, c, ("pair",))
        yield Case("geglu", rows, c, 4 * c)
        yield Case("attention", rows, c, side * side)
        yield Case("cross", rows, c, 77)
        yield Case("sums", rows, c, side * side, ("summed",))
        yield Case("sums", rows, c, side * side)
        yield Case("sums", rows, 2 * c, side * side, ("pair",))
    yield Case("attention", 16, 1280, 64)


def configs(case: Case) -> list[Any]:
    """Launch shapes to try."""
    if case.name == "sums":
        return [SumsTile(b, max(c, b), w) for b, c, w in product((64, 128, 256), (256, 512), (1, 2, 4, 8))]
    if case.name in ("attention", "cross"):
        return list(_attention_configs(case))
    total = ITEMS * case.rows if "norm" not in case.flags else case.rows
    heights = [h for h in (16, 32, 64, 128) if h <= launch.power_of_two(total)][-3:]
    found: list[Any] = []
    widths = (16, 32, 64, 128) if total <= 32 else (32, 64, 128)
    for h, w, d, warps, stages in product(heights, widths, (64, 128, 256), (2, 4, 8), (3, 4, 5)):
        both = 2 if case.name == "geglu" else 1
        area = h * w * both
        fits = (h + both * w) * d * 2 * stages <= SHARED_MEMORY and d <= case.channels
        right = {2: area <= 1024, 4: 512 <= area <= 8192, 8: area >= 8192}[warps]
        if not (fits and right) or case.beside % d or (stages == 5 and d > 64) or (stages == 4 and d > 128):
            continue
        tile = Tile(h, w, d, warps, stages)
        if case.name == "geglu":
            found.append(tile)
            continue
        tiles = cdiv(total, h) * (ITEMS if "norm" in case.flags else 1) * cdiv(case.width, w)
        blocks = cdiv(case.channels, d)
        for programs in (1, 2, 4, 8, 16):
            each = cdiv(blocks, programs)
            split = SplitK(cdiv(blocks, each), each)
            many = tiles * split.programs
            if split.programs == programs and (programs == 1 or (each >= 2 and many <= 1056)) and many >= 16:
                found.append((tile, split))
    return found


def _attention_configs(case: Case) -> Iterator[AttentionTile]:
    wide = launch.power_of_two(case.channels // 8)
    for q, k, warps, stages in product((16, 32, 64, 128), (32, 64, 128), (2, 4, 8), (1, 2, 3, 4)):
        if q > launch.power_of_two(case.rows) or (q + 2 * k * stages) * wide * 2 > SHARED_MEMORY:
            continue
        if (warps == 8 and q * k < 4096) or (warps == 2 and q * k > 2048) or q * wide > 16384 or k * wide > 16384:
            continue
        if case.name == "cross":
            yield AttentionTile(q, k, 1, warps, stages)
            continue
        tiles = cdiv(case.rows, q) * ITEMS * 8
        for programs in (1, 2, 4, 8, 16):
            if programs == 1 or (tiles * programs <= 1056 and cdiv(case.width, k) // programs >= 2):
                yield AttentionTile(q, k, programs, warps, stages)


def patched(case: Case, config: Any) -> Any:
    """Give a kernel a launch shape for as long as this is open."""
    module, name = {
        "linear": (linear, "gemm_tile"),
        "geglu": (feedforward, "geglu_tile"),
        "attention": (attention, "attention_tile"),
        "cross": (attention, "cross_tile"),
        "sums": (norm, "sums_tile"),
    }[case.name]
    return mock.patch.object(module, name, return_value=config)


def chosen(case: Case) -> Any:
    """The launch shape that `launch` chooses."""
    half, total = torch.float16, ITEMS * case.rows
    if case.name == "geglu":
        return launch.geglu_tile(total, case.width, case.channels, half)
    if case.name == "attention":
        return launch.attention_tile(8 * ITEMS, case.rows, case.width + case.rows, case.channels // 8, half)
    if case.name == "cross":
        return launch.cross_tile(case.rows, case.channels // 8, half)
    if case.name == "sums":
        return launch.sums_tile(case.rows)
    items, rows = (ITEMS, case.rows) if "norm" in case.flags else (1, total)
    return launch.gemm_tile(
        items, rows, case.width, case.channels, half, beside=case.beside, layer_norm="layer" in case.flags
    )


def calls(case: Case, device: torch.device) -> tuple[Call, Call, int]:
    """Triton's call and torch's, by the number of a copy of the weights, and how many copies there are."""

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).half()

    rows, k, n, flags = case.rows, case.channels, case.width, case.flags
    if case.name == "sums":
        return _sums_calls(case, rand)
    if case.name == "attention":
        packed, recorded = rand(ITEMS, rows, 3 * k), rand(2, n, k)
        placement = RowPlacement.empty(ITEMS, rows, n, device)
        placement.positions[:] = torch.arange(rows, device=device)
        placement.active_mask[:, :rows] = True
        placement.num_rows.fill_(rows)
        given: Any = (*packed.chunk(3, -1), recorded, recorded, placement, 8)
        return (lambda _: attention.attention(*given)), (lambda _: torch_backend.attention(*given)), 16
    per_copy = n * k * 2 * (2 if case.name == "geglu" else 1)
    copies = max(4, min(MAX_COPIES, COLD_BYTES // per_copy))
    x, gamma = rand(ITEMS, rows, k), rand(k)
    layer = (gamma, gamma, 1e-5)
    if case.name == "geglu":
        wide, bias = [rand(2 * n, k) * k**-0.5 for _ in range(copies)], rand(2 * n)
        return (
            (lambda i: feedforward.norm_geglu(x, wide[i], bias, layer)),
            (lambda i: torch_backend.norm_geglu(x, wide[i], bias, layer)),
            copies,
        )
    if case.name == "cross":
        square, text = [rand(k, k) * k**-0.5 for _ in range(MAX_COPIES)], rand(ITEMS, n, k)
        return (
            (lambda i: attention.cross_attention(x, layer, square[i], text, text, 8)),
            (lambda i: torch_backend.cross_attention(x, layer, square[i], text, text, 8)),
            MAX_COPIES,
        )
    weights, bias = [rand(n, k) * k**-0.5 for _ in range(copies)], rand(n)
    residual = rand(ITEMS, rows, n) if "residual" in flags else None
    split = case.beside
    entering: Any = (x[..., :split].contiguous(), x[..., split:].contiguous()) if split else x
    affine = torch.randn(ITEMS, 2, k, device=device) if "norm" in flags else None
    behind = layer if "layer" in flags else None
    return (
        (lambda i: linear.norm_linear(entering, weights[i], bias, affine, behind, residual)),
        (lambda i: torch_backend.norm_linear(entering, weights[i], bias, affine, behind, residual)),
        copies,
    )


def _sums_calls(case: Case, rand: Callable[..., Tensor]) -> tuple[Call, Call, int]:
    rows, k = case.rows, case.channels
    x, gamma = rand(ITEMS, rows, k), rand(k)
    statistics = torch.tensor([0.0, 4e4], dtype=torch.float64, device=x.device).repeat(2, 32, 1)
    count = torch.full((ITEMS,), rows, dtype=torch.int32, device=x.device)
    rest = statistics, count, case.width * k // 32, gamma, gamma, 1e-5
    if "summed" in case.flags:
        recorded = torch.randn(ITEMS, rows, 64, device=x.device)
        both = norm.summed_group_norm_affine, torch_backend.summed_group_norm_affine
        return (lambda _: both[0](x, recorded, *rest)), (lambda _: both[1](x, recorded, *rest)), 16
    half = k // 2
    entering: Any = (x[..., :half].contiguous(), x[..., half:].contiguous()) if "pair" in case.flags else x
    recorded = rand(ITEMS, rows, k)
    return (
        (lambda _: norm.group_norm_affine(entering, recorded, *rest)),
        (lambda _: torch_backend.group_norm_affine(entering, recorded, *rest)),
        16,
    )


def microseconds(call: Call, copies: int) -> float:
    """Median of a call in a captured graph of one for each copy of the weights."""
    call(0)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin()
        for i in range(copies):
            call(i)
        graph.capture_end()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1000 / copies)
    return median(times[1:])


def _compile(part: Sequence[tuple[Case, Any]]) -> None:
    """Take a share of all launch shapes to the compiler's cache."""
    for case, tried in groupby(part, itemgetter(0)):
        by_triton, _, _ = calls(case, torch.device("cuda"))
        for _, config in tried:
            with patched(case, config):
                by_triton(0)
    torch.cuda.synchronize()


def main() -> None:
    """Compile in several processes, then time one after another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triton_tuning", description=__doc__)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--limit", type=int, default=60, help="launch shapes of a case at most, drawn by chance")
    parser.add_argument("--after", type=Path, help="file that must be there before anything is timed")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tried = {case: sorted(configs(case), key=_order)[: options.limit] for case in cases()}
    everything = [(case, config) for case, found in tried.items() for config in [chosen(case), *found]]
    parts = [everything[i :: options.processes] for i in range(options.processes)]
    with get_context("spawn").Pool(options.processes) as pool:
        pool.map(_compile, parts)
    print(f"{len(everything)} are compiled", flush=True)
    while options.after and not options.after.exists():
        sleep(0.1)
    report = []
    for case, found in tried.items():
        by_triton, by_torch, copies = calls(case, torch.device("cuda"))
        expected = _first(by_torch(0)).float()
        timed = []
        for config in [chosen(case), *found]:
            with patched(case, config):
                error = float((_first(by_triton(0)) - expected).norm() / expected.norm())
                assert error <= TOLERANCE, f"{case} is wrong by {error:.1e} at {config}"
                timed.append((microseconds(by_triton, copies), config))
        torch_time = microseconds(by_torch, copies)
        now, best = timed[0], sorted(timed, key=lambda one: one[0])
        print(f"== {case}: torch {torch_time:.1f}, now {now[0]:.1f} {tuple(now[1])}")
        for time, config in best[:6]:
            print(f"   {time:6.1f}  {config}", flush=True)
        report.append(
            {"case": str(case), "torch": torch_time, "tried": [(time, str(config)) for time, config in timed]}
        )
        if options.output:
            options.output.write_text(json.dumps(report))


def _order(config: Any) -> str:
    """Return a key that sorts launch shapes at random, but alike for all cases: what is compiled for one serves
    others."""
    return sha256(repr(config[0] if isinstance(config[0], Tile) else config).encode()).hexdigest()


def _first(out: Any) -> Tensor:
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


if __name__ == "__main__":
    main()
