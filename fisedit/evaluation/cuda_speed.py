"""`fisedit bench edit --device cuda`: edits by captured graphs beside dense diffusers, eager and compiled, on one GPU.

Times are medians by device events. Masks are given, weights are those of SD 1.5's shapes, and the source is recorded.
Single steps are timed alone, with every set of kernels, and compared with the engine's own by the reference kernels in
the same precision; whole edits are `Editor.edit`, from prompt to picture, as a user would call it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from fisedit.editor import Editor
from fisedit.evaluation.speed import GUIDANCE, MASKS, PROMPTS, STEP_GROWTH, pipeline, square
from fisedit.models.device import choose_device, choose_dtype
from fisedit.sampling.denoise import Engine
from fisedit.sparse.cuda_graphs import GraphExecutor
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.reference import QUANTISED_DTYPES
from fisedit.values import LATENT_FACTOR, GenerationConfig, OnStep, SchedulerName

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from fisedit.history import EditResult
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import BoolGrid

Row = dict[str, Any]

BACKENDS = ("fast", "triton")
"""Torch's kernels in a graph, and ours in a graph."""

WHOLE_STEPS = (20, 50)
"""Steps of whole edits."""

BATCHES = (1, 4, 16)
"""Edits in one batch, of `BATCH_AREA` of the picture each, in different places."""

BATCH_AREA = 0.05

OFTEN = 10
"""How many times more often a single step is timed than a whole edit."""

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
    local_files_only: bool = False,
    repeats: int = 5,
    compiled: bool = True,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Measure steps, decodes, whole edits and batches.

    Args:
        model: as in `fisedit.models.loader.load`; None for SD 1.5's architecture with random weights.
        areas: shares of the picture, 0 to 1. size: pixels, square.
        num_inference_steps: of the source whose middle step is timed; whole edits have `WHOLE_STEPS`.
        repeats: of whole edits; single steps are timed `OFTEN` times as often.
        compiled: also measure diffusers under torch.compile, which takes minutes to compile.
        local_files_only: never reach for the network. on_step: called before every measurement with (i, n, None).

    Returns:
        {"settings", "dense", "rows", "batches", "summary"}, ready for JSON; times in seconds.

    Raises:
        InputError: there is no such GPU here.
    """
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    pipe = pipeline(model, where, precision, local_files_only=local_files_only)
    config = GenerationConfig(PROMPTS[0], 7, "", num_inference_steps, GUIDANCE, size, size, SchedulerName.DDIM)
    total = len(areas) * len(MASKS) + len(BATCHES) + 1

    def tick(i: int) -> None:
        if on_step is not None:
            on_step(i, total, None)

    with torch.inference_mode():
        tick(0)
        bench = Bench(pipe, config, repeats)
        dense = bench.dense(compiled=compiled)
        rows, grids = [], [(n, a, make(a, size // LATENT_FACTOR)) for n, make in MASKS.items() for a in areas]
        for i, (name, area, grid) in enumerate(grids, 1):
            tick(i)
            rows.append({"mask": name, "asked_area": area, **bench.row(grid, dense)})
        batches = []
        for i, edits in enumerate(BATCHES, len(grids) + 1):
            tick(i)
            batches.append(bench.batch(edits))
    settings = _settings(model, config, where, precision, repeats)
    summary = [_summary(row) for row in rows]
    return {"settings": settings, "dense": dense, "rows": rows, "batches": batches, "summary": summary}


class Bench:
    """One recorded source, the dense runs, and the captured graphs to compare with them."""

    def __init__(self, pipe: StableDiffusionPipeline, config: GenerationConfig, repeats: int) -> None:
        self.pipe, self.config, self.repeats, self.engine = pipe, config, repeats, Engine(pipe)
        self.device = pipe.unet.device
        self.costs = self.engine.costs(config)
        self.source = self.engine.record(config, self.engine.encode(config), lambda *_: None)
        self.text = self.engine.encode(replace(config, prompt=PROMPTS[1]))
        self.middle = config.num_inference_steps // 2
        self.times = self.engine.sampler(config).timesteps
        self.editors: dict[tuple[str, int], Editor] = {}

    def dense(self, *, compiled: bool = True) -> Row:
        """Diffusers' step, decode and whole pictures, eager and compiled with graphs; weights in channels_last."""
        row = self._dense("eager")
        row["step_roofline_seconds"] = self._roofline(self.costs.dense_step())
        if compiled:
            with self._compiled():
                row |= self._dense("compiled")
        return row

    def _dense(self, name: str) -> Row:
        latents, vae, unet = self._doubled(self.source.latents[self.middle]), self.pipe.vae, self.pipe.unet
        time = self.times[self.middle]

        def step() -> object:
            return unet(latents, time, self.text, return_dict=False)

        def decoded() -> object:
            return vae.decode(self.source.latents[-1] / vae.config.scaling_factor, return_dict=False)

        row: Row = {f"{name}_step_seconds": self.timed(step), f"{name}_kernels": self.kernels(step)}
        row[f"{name}_decode_seconds"] = self.timed(decoded)
        for steps in WHOLE_STEPS:
            row[f"{name}_whole_{steps}_seconds"] = self.timed(partial(self._pictured, steps), whole=True)
        return row

    @contextmanager
    def _compiled(self) -> Iterator[None]:
        """The UNet and the decoder compiled, with graphs; the text encoder is less than a hundredth of a whole run."""
        pipe, unet, decoder = self.pipe, self.pipe.unet, self.pipe.vae.decoder
        pipe.unet, pipe.vae.decoder = (torch.compile(part, mode="max-autotune") for part in (unet, decoder))
        try:
            yield
        finally:
            pipe.unet, pipe.vae.decoder = unet, decoder

    def row(self, grid: BoolGrid, dense: Row) -> Row:
        """One mask: a step by every backend, and whole edits by the faster one."""
        plan = self.engine.plan(grid, STEP_GROWTH)
        row: Row = {"area": float(grid.mean()), "active_rows": plan.rows, "growth": STEP_GROWTH}
        row["step_roofline_seconds"] = self._roofline(self.costs.sparse_step(grid, STEP_GROWTH))
        latents, time = self._doubled(self.source.latents[self.middle]), self.times[self.middle]
        with ops.use("reference"):
            features = self.source.features[self.middle]
            expected, _ = self.engine.executor.run_sparse(latents, time, self.text, {}, features, plan)
        for backend in BACKENDS:
            with ops.use(backend):
                measured = self._step(plan, latents, expected)
            row |= {f"{backend}_{name}": value for name, value in measured.items()}
        row["backend"] = best = min(BACKENDS, key=lambda name: float(row[f"{name}_step_seconds"]))
        with ops.use(best):
            for kind in QUANTISED_DTYPES:
                measured = self._step(plan, latents, expected, coded=kind)
                row |= {f"{kind}_{name}": value for name, value in measured.items()}
        for steps in WHOLE_STEPS:
            row |= self.whole(grid, steps, best)
        for name in ("eager", "compiled"):
            if f"{name}_step_seconds" in dense:
                row[f"step_ratio_to_{name}"] = dense[f"{name}_step_seconds"] / row[f"{best}_step_seconds"]
                for whole in (f"whole_{steps}" for steps in WHOLE_STEPS):
                    row[f"{whole}_ratio_to_{name}"] = dense[f"{name}_{whole}_seconds"] / row[f"{whole}_seconds"]
        return row

    def _step(self, plan: SparsePlan, latents: Tensor, expected: Tensor, *, coded: str = "") -> Row:
        """One step, its keys and values perhaps in a byte a number; the error is relative to the engine's own."""
        features, executor = {self.middle: self.source.features[self.middle]}, self.engine.executor
        edit = GraphExecutor(executor, coded=coded).begin([plan], features, self.text)
        step = partial(edit.step, self.middle, latents, self.times[self.middle])
        got = step()[:, : plan.rows[0]].float()
        return {
            "error": float((got - expected).norm() / expected.float().norm()),
            "step_seconds": self.timed(step),
            "kernels": self.kernels(step),
            "feature_bytes": edit.feed.bytes,
        }

    def whole(self, grid: BoolGrid, steps: int, backend: str) -> Row:
        """Whole edits through the public face."""
        editor, name = self._editor(backend, steps), f"whole_{steps}"
        with ops.use(backend):
            seconds = self.timed(partial(self._edited, editor, grid), whole=True)
            stats = self._edited(editor, grid).stats
        return {
            f"{name}_seconds": seconds,
            f"{name}_stations": stats.seconds,
            f"{name}_captured": stats.unet_evaluations_captured,
            f"{name}_fallback": stats.fallback or stats.uncaptured,
        }

    def batch(self, edits: int) -> Row:
        """A step of several edits of one source at once, each a square somewhere else."""
        side = self.config.height // LATENT_FACTOR
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
        row["backend"] = best = min(BACKENDS, key=lambda name: float(row[f"{name}_step_seconds"]))
        for steps in WHOLE_STEPS:
            with ops.use(best):
                seconds = self.timed(partial(self._edited_many, self._editor(best, steps), grids), whole=True)
            row[f"whole_{steps}_seconds"], row[f"whole_{steps}_edits_a_second"] = seconds, edits / seconds
        return row

    def timed(self, call: Callable[[], object], *, whole: bool = False) -> float:
        """Median seconds of a call after warm-up."""
        repeats = self.repeats if whole else OFTEN * self.repeats
        for _ in range(2 if whole else 3):
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

    def _editor(self, backend: str, steps: int) -> Editor:
        """An editor that stands on a source of so many steps. Graphs belong to one set of kernels."""
        if (backend, steps) not in self.editors:
            alike = next((e for (name, _), e in self.editors.items() if name == backend), None)
            editor = alike.beside() if alike else Editor(self.pipe, graphs=True)
            r = self.config
            self.editors[backend, steps] = editor
            editor.generate(
                r.prompt,
                seed=r.seed,
                num_inference_steps=steps,
                guidance_scale=r.guidance_scale,
                width=r.width,
                height=r.height,
            )
        return self.editors[backend, steps]

    def _edited(self, editor: Editor, grid: BoolGrid) -> EditResult:
        """One edit of the source, which then is where it was."""
        result = editor.edit(PROMPTS[1], mask=grid)
        editor.delete(result.id)
        return result

    def _edited_many(self, editor: Editor, grids: Sequence[BoolGrid]) -> tuple[EditResult, ...]:
        results = editor.edit_many([PROMPTS[1]] * len(grids), grids)
        for result in results:
            editor.delete(result.id)
        return results

    def _doubled(self, latents: Tensor) -> Tensor:
        return torch.cat([latents] * self.engine.batch(self.config))

    def _pictured(self, steps: int) -> object:
        r = self.config
        return self.pipe(
            prompt=r.prompt,
            width=r.width,
            height=r.height,
            num_inference_steps=steps,
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
    if row["step_roofline_seconds"]:
        shown["roofline"] = f"{row['step_roofline_seconds'] * 1000:.2f} ms"
    shown["launched"] = str(row[f"{best}_kernels"])
    for name in ("eager", "compiled"):
        for what in ("step", *(f"whole_{steps}" for steps in WHOLE_STEPS)):
            if f"{what}_ratio_to_{name}" in row:
                shown[f"{what} over {name}".replace("_", " ")] = f"{row[f'{what}_ratio_to_{name}']:.1f}x"
    return shown | {"error": f"{row[f'{best}_error']:.1e}"}


def _settings(
    model: str | None, config: GenerationConfig, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    import diffusers
    import triton

    return {
        "model": model or "SD 1.5 architecture, random weights",
        "pixels": config.width,
        "num_inference_steps": config.num_inference_steps,
        "whole_steps": WHOLE_STEPS,
        "guidance_scale": config.guidance_scale,
        "scheduler": config.scheduler.value,
        "dtype": str(dtype).removeprefix("torch."),
        "memory_format": "channels_last",
        "step_growth": STEP_GROWTH,
        "cache": "warm: the source is recorded, in the GPU's memory; graphs are captured before timing",
        "whole": "from prompt to picture by Editor.edit, text and decode included; the mask is given",
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
    folder = Path(__file__).resolve().parents[2] / ".git"
    try:
        head = (folder / "HEAD").read_text().strip()
        return (folder / head.removeprefix("ref: ")).read_text().strip() if head.startswith("ref: ") else head
    except OSError:
        return ""
