"""`fisedit bench edit --device cuda`: edits by captured graphs beside dense diffusers, eager and compiled, on one GPU.

Times are medians by device events. Masks are given, weights are those of SD 1.5's shapes, and the source is recorded.
Every sparse step is also compared with the engine's own, by the reference kernels in the same precision.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fisedit import __version__
from fisedit.benchmark import GUIDANCE, MASKS, PROMPTS, STEP_GROWTH, square
from fisedit.captured import GraphExecutor
from fisedit.costs import Costs, default_growth
from fisedit.decode import decode, decode_boxes
from fisedit.devices import choose_device, choose_dtype
from fisedit.models import load
from fisedit.random_model import random_pipeline
from fisedit.source import Engine, Story
from fisedit.sparse_kernels import ops
from fisedit.values import LATENT_FACTOR, OnStep, Recipe, SchedulerName

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from fisedit.values import BoolGrid

Row = dict[str, Any]

BACKENDS = ("fast", "triton")
"""Torch's kernels in a graph, and ours in a graph."""

BATCHES = (1, 4, 16)
"""Edits in one batch, of `BATCH_AREA` of the picture each, in different places."""

BATCH_AREA = 0.05

PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12)}
"""GPU -> (16-bit operations a second, bytes a second), by the maker's data sheets of the SXM boards."""


def run(
    *,
    model: str | None = None,
    areas: Sequence[float] = (0.01, 0.05, 0.15, 0.25, 0.5),
    size: int = 512,
    num_inference_steps: int = 50,
    device: str = "cuda",
    dtype: str | None = None,
    repeats: int = 20,
    compiled: bool = True,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Measure steps, decodes, whole edits and batches.

    Args:
        model: as in `fisedit.models.load`; None for SD 1.5's architecture with random weights.
        areas: shares of the picture, 0 to 1. size: pixels, square. repeats: of every measurement.
        compiled: also measure diffusers under torch.compile, which takes minutes to compile.
        on_step: called before every measurement with (i, n, None).

    Returns:
        {"settings", "dense", "rows", "batches", "summary"}, ready for JSON; times in seconds.

    Raises:
        InputError: there is no such GPU here.
    """
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    pipe = random_pipeline(where, precision) if model is None else load(model, device=where, dtype=precision)
    recipe = Recipe(PROMPTS[0], 7, "", num_inference_steps, GUIDANCE, size, size, SchedulerName.DDIM)
    total = len(areas) * len(MASKS) + len(BATCHES) + 1

    def tick(i: int) -> None:
        if on_step is not None:
            on_step(i, total, None)

    with torch.inference_mode():
        tick(0)
        bench = Bench(pipe, recipe, repeats)
        dense = bench.dense(compiled=compiled)
        rows, grids = [], [(n, a, make(a, size // LATENT_FACTOR)) for n, make in MASKS.items() for a in areas]
        for i, (name, area, grid) in enumerate(grids, 1):
            tick(i)
            rows.append({"mask": name, "asked_area": area, **bench.row(grid, dense)})
        batches = []
        for i, edits in enumerate(BATCHES, len(grids) + 1):
            tick(i)
            batches.append(bench.batch(edits))
    settings = _settings(model, recipe, where, precision, repeats)
    summary = [_summary(row) for row in rows]
    return {"settings": settings, "dense": dense, "rows": rows, "batches": batches, "summary": summary}


class Bench:
    """One recorded source, the dense runs, and the captured graphs to compare with them."""

    def __init__(self, pipe: StableDiffusionPipeline, recipe: Recipe, repeats: int) -> None:
        self.pipe, self.recipe, self.repeats, self.engine = pipe, recipe, repeats, Engine(pipe)
        self.device = pipe.unet.device
        self.costs = Costs(self.engine, recipe)
        self.source = self.engine.record(recipe, self.engine.encode(recipe), lambda *_: None)
        self.text = self.engine.encode(replace(recipe, prompt=PROMPTS[1]))
        self.middle = recipe.num_inference_steps // 2
        self.times = self.engine.sampler(recipe).timesteps
        self.picture, self.decoder = decode(pipe.vae, self.source.latents[-1])

    def dense(self, *, compiled: bool = True) -> Row:
        """Diffusers' step, decode and whole pictures, eager and compiled with graphs; fp16 weights in channels_last."""
        latents, vae = self._doubled(self.source.latents[self.middle]), self.pipe.vae
        time = self.times[self.middle]

        def step(unet: Callable[..., Any]) -> Callable[[], object]:
            return lambda: unet(latents, time, self.text, return_dict=False)

        def decoded() -> object:
            return vae.decode(self.source.latents[-1] / vae.config.scaling_factor, return_dict=False)

        eager = self.pipe.unet
        row: Row = {
            "eager_step_seconds": self.timed(step(eager)),
            "eager_kernels": self.kernels(step(eager)),
            "decode_seconds": self.timed(decoded),
            "eager_whole_seconds": self.timed(self._pictured, few=True),
            "step_roofline_seconds": self._roofline(self.costs.dense_step()),
        }
        if compiled:
            fast = torch.compile(eager, mode="max-autotune")
            row["compiled_step_seconds"] = self.timed(step(fast))
            row["compiled_kernels"] = self.kernels(step(fast))
            self.pipe.unet = fast
            try:
                row["compiled_whole_seconds"] = self.timed(self._pictured, few=True)
            finally:
                self.pipe.unet = eager
        return row

    def row(self, grid: BoolGrid, dense: Row) -> Row:
        """One mask: a step by every backend, the decode, the whole edit."""
        plan = self.engine.plan(grid, STEP_GROWTH)
        row: Row = {"area": float(grid.mean()), "active_rows": plan.rows, "growth": STEP_GROWTH}
        row["step_roofline_seconds"] = self._roofline(self.costs.sparse_step(grid, STEP_GROWTH))
        latents, time = self._doubled(self.source.latents[self.middle]), self.times[self.middle]
        with ops.use("reference"):
            features = self.source.features[self.middle]
            expected, _ = self.engine.executor.replay(latents, time, self.text, {}, features, plan)
        for backend in BACKENDS:
            with ops.use(backend):
                edit = GraphExecutor(self.engine.executor).begin([plan], {self.middle: features}, self.text)

                step = partial(edit.step, self.middle, latents, time)
                got = step()[:, : plan.rows[0]].float()
                row[f"{backend}_error"] = float((got - expected).norm() / expected.float().norm())
                row[f"{backend}_step_seconds"] = self.timed(step)
                row[f"{backend}_kernels"] = self.kernels(step)
        row["backend"] = best = min(BACKENDS, key=lambda name: row[f"{name}_step_seconds"])
        with ops.use(best):
            graphs = GraphExecutor(self.engine.executor)
            row["decode_seconds"] = self.timed(lambda: self._decoded(self.source.latents[-1], grid))
            row["whole_seconds"] = self.timed(lambda: self._whole(graphs, grid), few=True)
        for name in ("eager", "compiled"):
            if f"{name}_step_seconds" in dense:
                row[f"step_ratio_to_{name}"] = dense[f"{name}_step_seconds"] / row[f"{best}_step_seconds"]
                row[f"whole_ratio_to_{name}"] = dense[f"{name}_whole_seconds"] / row["whole_seconds"]
        return row

    def batch(self, edits: int) -> Row:
        """A step of several edits of one source at once, each a square somewhere else."""
        side = self.recipe.height // LATENT_FACTOR
        grids = [np.roll(square(BATCH_AREA, side), (4 * e, 7 * e), (0, 1)) for e in range(edits)]
        plans = [self.engine.plan(grid, STEP_GROWTH) for grid in grids]
        text = self.text.repeat_interleave(edits, 0)
        latents = self._doubled(self.source.latents[self.middle]).repeat_interleave(edits, 0)
        row: Row = {"edits": edits, "area": BATCH_AREA}
        features = {self.middle: self.source.features[self.middle]}
        for backend in BACKENDS:
            with ops.use(backend):
                edit = GraphExecutor(self.engine.executor).begin(plans, features, text)
                seconds = self.timed(partial(edit.step, self.middle, latents, self.times[self.middle]))
            row[f"{backend}_step_seconds"], row[f"{backend}_edit_steps_a_second"] = seconds, edits / seconds
        return row

    def edited(self, graphs: GraphExecutor, grid: BoolGrid) -> list[Tensor]:
        """A whole DDIM edit by captured graphs, default growth: N + 1 latents [1, 4, h, w]; the loop never waits."""
        growth, source = default_growth(len(self.times)), self.source
        edits = {}
        for cells in set(growth):
            steps = {i: source.features[i] for i, g in enumerate(growth) if g == cells}
            edits[cells] = graphs.begin([self.engine.plan(grid, cells)], steps, self.text)
        inside = torch.from_numpy(grid.copy()).to(self.device)
        path, guidance = [source.latents[0]], self.recipe.guidance_scale
        for i, ((keep, add), t) in enumerate(zip(self._coefficients(source), self.times, strict=True)):
            edit = edits[growth[i]]
            rows = edit.step(i, self._doubled(path[-1]), t)
            prediction = ops.composite(source.predictions[i], rows, edit.place, guidance)
            following = (keep * path[-1].float() + add * prediction.float()).to(prediction.dtype)
            path.append(torch.where(inside, following, source.latents[i + 1]))
        return path

    def timed(self, call: Callable[[], object], *, few: bool = False) -> float:
        """Median seconds of a call after warm-up; a fifth as often where it is long."""
        repeats = max(3, self.repeats // 5) if few else self.repeats
        for _ in range(2 if few else 3):
            call()
        return median(self._once(call) for _ in range(repeats))

    def _once(self, call: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = perf_counter()
            call()
            return perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def kernels(self, call: Callable[[], object]) -> int:
        """Kernels that a call launches; 0 on a CPU."""
        from torch.profiler import ProfilerActivity, profile

        if self.device.type != "cuda":
            return 0
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        names = (e.name for e in seen.events() if e.device_type.name == "CUDA")
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)

    def _coefficients(self, source: Story) -> list[tuple[float, float]]:
        """What DDIM makes of latents and prediction at every step: a sum of both, found by asking."""
        sampler, shape = self.engine.sampler(self.recipe), source.latents[0]
        one, none = (torch.full_like(shape, value, dtype=torch.float32) for value in (1.0, 0.0))
        found = []
        for t in sampler.timesteps:
            keep, add = sampler.step(none, t, one), sampler.step(one, t, none)
            found.append((float(keep.flatten()[0]), float(add.flatten()[0])))
        return found

    def _doubled(self, latents: Tensor) -> Tensor:
        return torch.cat([latents] * self.engine.batch(self.recipe))

    def _whole(self, graphs: GraphExecutor, grid: BoolGrid) -> object:
        """Everything between a prompt and a picture, with a mask that is given."""
        self.text = self.engine.encode(replace(self.recipe, prompt=PROMPTS[1]))
        return self._decoded(self.edited(graphs, grid)[-1], grid)

    def _decoded(self, latents: Tensor, grid: BoolGrid) -> object:
        return decode_boxes(self.pipe.vae, latents, grid, self.decoder, self.picture)

    def _pictured(self) -> object:
        r = self.recipe
        return self.pipe(
            prompt=r.prompt,
            width=r.width,
            height=r.height,
            num_inference_steps=r.num_inference_steps,
            guidance_scale=r.guidance_scale,
            generator=torch.Generator().manual_seed(r.seed),
        )

    def _roofline(self, macs: int) -> float | None:
        """Seconds that no kernel can beat: arithmetic at the peak, or one reading of the weights."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        for chip, (operations, bandwidth) in PEAKS.items():
            if chip in name:
                weights = sum(int(p.nbytes) for p in self.pipe.unet.parameters())
                return float(max(2 * macs / operations, weights / bandwidth))
        return None


def _summary(row: Row) -> Row:
    """What a reader wants first."""
    best = row["backend"]
    shown = {"mask": row["mask"], "area": f"{row['area']:.1%}", "kernels by": best}
    shown["step"] = f"{row[f'{best}_step_seconds'] * 1000:.2f} ms"
    shown["launched"] = str(row[f"{best}_kernels"])
    for name in ("eager", "compiled"):
        for what in ("step", "whole"):
            if f"{what}_ratio_to_{name}" in row:
                shown[f"{what} over {name}"] = f"{row[f'{what}_ratio_to_{name}']:.1f}x"
    return shown | {"error": f"{row[f'{best}_error']:.1e}"}


def _settings(
    model: str | None, recipe: Recipe, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    import diffusers
    import triton

    return {
        "model": model or "SD 1.5 architecture, random weights",
        "pixels": recipe.width,
        "num_inference_steps": recipe.num_inference_steps,
        "guidance_scale": recipe.guidance_scale,
        "scheduler": recipe.scheduler.value,
        "dtype": str(dtype).removeprefix("torch."),
        "step_growth": STEP_GROWTH,
        "cache": "warm: the source is recorded, in the GPU's memory",
        "repeats": repeats,
        "device": torch.cuda.get_device_name(device),
        "commit": _commit(),
        "versions": {
            "fisedit": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "diffusers": diffusers.__version__,
            "python": platform.python_version(),
        },
    }


def _commit() -> str:
    """The commit this runs from, or "" where there is no checkout."""
    folder = Path(__file__).resolve().parents[1] / ".git"
    try:
        head = (folder / "HEAD").read_text().strip()
        return (folder / head.removeprefix("ref: ")).read_text().strip() if head.startswith("ref: ") else head
    except OSError:
        return ""
