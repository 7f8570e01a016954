"""`fisedit bench edit`: what an edit costs beside dense diffusers, measured in one process, interleaved, in medians.

The dense baseline is the best run a user could have: diffusers' own pipeline in the device's best precision,
channels-last, in memory that is kept. Plain diffusers (float32, as it comes) is measured beside it. Masks are given, so
only the engine counts.
"""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fisedit import __version__
from fisedit.editor import Editor
from fisedit.masking import masks
from fisedit.models.device import choose_device, choose_dtype
from fisedit.models.loader import load
from fisedit.models.malloc import keep_freed_memory
from fisedit.models.random_init import random_pipeline
from fisedit.sampling.denoise import Engine
from fisedit.sparse.vae_decode import decode, decode_boxes
from fisedit.values import LATENT_FACTOR, GenerationConfig, OnStep, SchedulerName

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from fisedit.values import BoolGrid

PROMPTS = ("a cat and a cake on a beach", "a dog and a cake on a beach")
GUIDANCE = 7.5
ROUNDS = 3
"""How often whole runs take turns, at most: dense ones, recorded sources and edits."""

STEP_GROWTH = 1
"""Growth at which single steps are compared; whole edits use the default settings."""

Row = dict[str, Any]


def run(
    *,
    model: str | None = None,
    areas: Sequence[float] = (0.01, 0.05, 0.15, 0.25, 0.5, 0.8),
    size: int = 512,
    num_inference_steps: int = 20,
    device: str | None = None,
    dtype: str | None = None,
    local_files_only: bool = False,
    repeats: int = 5,
    plain: bool = True,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Measure steps, decodes and whole edits over squares and ragged masks.

    Args:
        model: as in `fisedit.models.loader.load`; None for SD 1.5's architecture with random weights.
        areas: shares of the picture, 0 to 1. size: pixels, square. repeats: of single steps and decodes.
        plain: also measure diffusers as it comes, in float32 (needs memory for a second set of weights).
        local_files_only: never reach for the network. on_step: called before every measurement with (i, n, None).

    Returns:
        {"settings", "dense", "rows", "summary"}, ready for JSON; times in seconds, ratios over the dense run.
    """
    keep_freed_memory()
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    pipe = pipeline(model, where, precision, local_files_only=local_files_only)
    config = GenerationConfig(PROMPTS[0], 7, "", num_inference_steps, GUIDANCE, size, size, SchedulerName.DDIM)
    grids = [(name, area, make(area, size // LATENT_FACTOR)) for name, make in MASKS.items() for area in areas]
    with torch.inference_mode():
        bench = _Bench(pipe, config, repeats, _Progress(on_step, len(grids) + 2 + min(repeats, ROUNDS)))
        dense = bench.dense(plain)
        rows = []
        for i, (name, area, grid) in enumerate(grids):
            rows.append(bench.row(name, area, grid))
            if (i + 1) % len(areas) == 0:
                bench.whole(dense)
        bench.again(dense, rows, [grid for _, _, grid in grids])
        bench.finish(dense, rows)
    told = settings(model, config, where, precision, repeats)
    return {"settings": told, "dense": dense, "rows": rows, "summary": [_summary(row) for row in rows]}


def pipeline(
    model: str | None, device: torch.device, dtype: torch.dtype, *, local_files_only: bool
) -> StableDiffusionPipeline:
    """What is measured: a model as in `loader.load`, or None for SD 1.5's architecture with random weights."""
    if model is None:
        return random_pipeline(device, dtype)
    return load(model, device=device, dtype=dtype, local_files_only=local_files_only)


def square(area: float, side: int) -> BoolGrid:
    """A centred square of about `area` of a grid [side, side]."""
    edge = max(1, round(area**0.5 * side))
    grid, start = np.zeros((side, side), bool), (side - edge) // 2
    grid[start : start + edge, start : start + edge] = True
    return grid


def ragged(area: float, side: int) -> BoolGrid:
    """Uneven blobs of about `area` of a grid [side, side]: three or four, as published automatic masks have once specks
    under 1 % are dropped."""
    from scipy.ndimage import gaussian_filter

    field = gaussian_filter(np.random.default_rng(3).normal(size=(side, side)), side / 11)
    return masks.clean_mask(field > np.quantile(field, 1 - area), dilation=0)


MASKS: dict[str, Callable[[float, int], BoolGrid]] = {"square": square, "ragged": ragged}


@dataclass
class _Progress:
    on_step: OnStep | None
    total: int
    done: int = 0

    def tick(self) -> None:
        if self.on_step is not None:
            self.on_step(self.done, self.total, None)
        self.done += 1


class _Bench:
    """One engine, one recorded source, and the dense runs to compare with."""

    def __init__(
        self, pipe: StableDiffusionPipeline, config: GenerationConfig, repeats: int, progress: _Progress
    ) -> None:
        self.pipe, self.config, self.progress = pipe, config, progress
        self.repeats, self.rounds = repeats, min(repeats, ROUNDS)
        self.editor, self.engine = Editor(pipe), Engine(pipe)
        self.costs = self.engine.costs(config)
        self.text = self.engine.encode(config)
        sampler = self.engine.sampler(config)
        self.timestep = sampler.timesteps[len(sampler.timesteps) // 2]
        self.latents = torch.cat([sampler.latents] * self.engine.batch(config))

    def dense(self, plain: bool) -> Row:
        """Dense references, the recorded source, and what recording costs."""
        self.progress.tick()
        step = self._dense_step()
        step()
        macs = self.costs.dense_step()
        with _counted() as counter:
            step()
        counted = counter.get_total_flops() // 2
        times = interleaved({"dense": step, "recorded": lambda: self._record(self.latents)}, self.repeats)
        row: Row = {"step_seconds": times["dense"], "step_macs": macs, "step_macs_counted_by_torch": counted}
        row["recording_overhead"] = times["recorded"] / times["dense"] - 1
        self.progress.tick()
        row |= {"whole_seconds": [], "recorded_whole_seconds": []}
        for _ in range(self.rounds):
            self.whole(row)
            self.editor = Editor(self.pipe)
            row["recorded_whole_seconds"].append(_timed(lambda: self.editor.generate(**self._asked())))
        row["recording_whole_overhead"] = median(row["recorded_whole_seconds"]) / median(row["whole_seconds"]) - 1
        row["recorded_bytes"] = self.editor.current.stats.recorded_bytes
        self.maps = self._record(self.latents)
        self.picture, self.decoder = decode(self.pipe.vae, self._final())
        self.progress.tick()
        return row | (self._plain() if plain else {})

    def row(self, name: str, area: float, grid: BoolGrid) -> Row:
        """One mask: step, decode, whole edit, each interleaved with its dense counterpart."""
        self.progress.tick()
        plan = self.engine.plan(grid, STEP_GROWTH)
        sparse = self._sparse_step(plan)
        sparse()
        with _counted() as counter:
            sparse()
        step = interleaved({"dense": self._dense_step(), "sparse": sparse}, self.repeats)
        vae, latents = self.pipe.vae, self._final()
        decodes = {
            "dense": lambda: vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0],
            "sparse": lambda: decode_boxes(vae, latents, grid, self.decoder, self.picture),
        }
        decoded = interleaved(decodes, self.repeats)
        row: Row = {"whole_runs": [self._edit(grid)]}
        stats = self.editor.current.stats
        if stats.fallback:  # as long as a dense run, so in turns with some; the first lay in fresh memory
            row["whole_fresh_seconds"] = row["whole_runs"].pop()
            pairs = [(_timed(self._generate), self._edit(grid)) for _ in range(self.rounds)]
            row["whole_dense_seconds"], row["whole_runs"] = (
                median(dense for dense, _ in pairs),
                [ours for _, ours in pairs],
            )
            row["whole_pairs_seconds"] = pairs  # dense, ours
        return row | {
            "mask": name,
            "area": float(grid.mean()),
            "asked_area": area,
            "step_macs": self.costs.sparse_step(grid, STEP_GROWTH),
            "step_macs_ratio": self.costs.dense_step() / self.costs.sparse_step(grid, STEP_GROWTH),
            "step_macs_counted_by_torch": counter.get_total_flops() // 2,
            "step_seconds": step["sparse"],
            "step_ratio": step["dense"] / step["sparse"],
            "decode_seconds": decoded["sparse"],
            "decode_ratio": decoded["dense"] / decoded["sparse"],
            "whole_macs_ratio": stats.macs_dense / stats.macs,
            "growth": stats.growth,
            "fallback": stats.fallback,
            "overlay_bytes": stats.recorded_bytes,
        }

    def whole(self, dense: Row) -> None:
        """Run diffusers' dense pipeline once more, between the edits."""
        dense["whole_seconds"].append(_timed(self._generate))

    def again(self, dense: Row, rows: list[Row], grids: list[BoolGrid]) -> None:
        """More rounds of every sparse edit, with a dense run before each round."""
        for _ in range(self.rounds - 1):
            self.progress.tick()
            self.whole(dense)
            for row, grid in zip(rows, grids, strict=True):
                if not row["fallback"]:
                    row["whole_runs"].append(self._edit(grid))

    def finish(self, dense: Row, rows: list[Row]) -> None:
        """Put every whole edit over the dense median; one that ran dense over the runs beside it."""
        whole = median(dense["whole_seconds"])
        for row in rows:
            row["whole_seconds"] = median(row["whole_runs"])
            row["whole_ratio"] = row.get("whole_dense_seconds", whole) / row["whole_seconds"]
            if "plain_step_seconds" in dense:
                row["step_ratio_to_plain"] = dense["plain_step_seconds"] / row["step_seconds"]
        dense["peak_memory_bytes"] = _peak_memory(self.pipe.unet.device)

    def _plain(self) -> Row:
        """Diffusers as it comes: float32, contiguous; one step."""
        unet = type(self.pipe.unet).from_config(self.pipe.unet.config).to(self.latents.device)
        latents, text = self.latents.float(), self.text.float()
        seconds = min(_timed(lambda: unet(latents, self.timestep, text)) for _ in range(2))
        return {"plain_step_seconds": seconds}

    def _asked(self) -> dict[str, Any]:
        r = self.config
        sizes = {"width": r.width, "height": r.height, "num_inference_steps": r.num_inference_steps}
        return {"prompt": r.prompt, "seed": r.seed, "guidance_scale": r.guidance_scale, **sizes}

    def _edit(self, grid: BoolGrid) -> float:
        """Seconds of a whole edit of the source, in the memory that the one before it had."""
        for earlier in self.editor.history[1:]:
            self.editor.delete(earlier.id)
        self.editor.checkout("0")
        return _timed(lambda: self.editor.edit(PROMPTS[1], mask=grid))

    def _generate(self) -> None:
        asked = self._asked()
        self.pipe(generator=torch.Generator().manual_seed(asked.pop("seed")), **asked)

    def _final(self) -> Tensor:
        return torch.randn(self.latents[:1].shape, generator=torch.Generator().manual_seed(1)).to(self.latents)

    def _dense_step(self) -> Callable[[], object]:
        return lambda: self.pipe.unet(self.latents, self.timestep, self.text, return_dict=False)

    def _record(self, latents: Tensor) -> Any:
        return self.engine.executor.run_dense(latents, self.timestep, self.text, {})[1]

    def _sparse_step(self, plan: Any) -> Callable[[], object]:
        cache: dict[str, Tensor] = {}
        return lambda: self.engine.executor.run_sparse(self.latents, self.timestep, self.text, cache, self.maps, plan)


def _summary(row: Row) -> Row:
    """What a reader wants first: times faster than the dense run, and a step than plain diffusers' if it was timed."""
    shown = {"MACs": "step_macs_ratio", "step": "step_ratio", "whole edit": "whole_ratio", "decode": "decode_ratio"}
    shown |= {"step, to plain": "step_ratio_to_plain"} if "step_ratio_to_plain" in row else {}
    return {"mask": row["mask"], "area": f"{row['area']:.1%}"} | {k: f"{row[v]:.1f}x" for k, v in shown.items()}


def interleaved(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call, taking turns, after one warm-up."""
    return {name: median(seconds) for name, seconds in turns(calls, repeats).items()}


def turns(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call in every turn, after one warm-up."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(_timed(call))
    return times


def _timed(call: Callable[[], object]) -> float:
    _synchronise()
    start = perf_counter()
    call()
    _synchronise()
    return perf_counter() - start


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _counted() -> Iterator[Any]:
    """Torch's own counter, told of the kernels that it has no formula for."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def linear(rows: Any, *_: Any, out_shape: Any, **__: Any) -> int:
        return int(2 * prod(rows) * out_shape[-1])

    kernels: dict[Any, Callable[..., int]] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention  # noqa: SLF001 (its only name)
    }  # the packed convs of dense steps are not here: what is counted runs densely in diffusers alone
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        kernels[torch.ops.mkldnn._linear_pointwise] = linear  # noqa: SLF001
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        yield counter


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def settings(
    model: str | None, config: GenerationConfig, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    """What is measured, on which device, by which versions."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "model": model or "SD 1.5 architecture, random weights",
        "pixels": config.width,
        "num_inference_steps": config.num_inference_steps,
        "guidance_scale": config.guidance_scale,
        "scheduler": config.scheduler.value,
        "dtype": str(dtype).removeprefix("torch."),
        "dense_baseline": f"diffusers, {str(dtype).removeprefix('torch.')}, channels_last",
        "plain_baseline": "diffusers, float32, contiguous",
        "step_growth": STEP_GROWTH,
        "cache": "warm: the source is recorded, and memory that was freed is kept",
        "repeats": repeats,
        "device": f"{chip}, {torch.get_num_threads()} threads",
        "versions": {"fisedit": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
