"""`fisedit bench edit --device cuda`: edits by captured graphs beside the fastest dense run of one GPU.

That run is searched for (`dense_search`); plain diffusers (float32, contiguous, eager) is timed beside it. Times are
medians by device events. Masks are given, weights are those of SD 1.5's shapes, and the source is recorded. Steps are
timed alone, with every set of kernels, and compared with the engine's own by the reference kernels in the same
precision; whole edits are `Editor.edit`, from prompt to picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fisedit.editor import Editor
from fisedit.evaluation.dense_pipelines import DensePipelines
from fisedit.evaluation.dense_search import DEFAULT_VARIANT
from fisedit.evaluation.workload import PROMPTS, STEP_DILATION, load_workload, masks_of_areas, square_mask
from fisedit.sampling.denoise import Engine
from fisedit.sparse.cuda_graphs import GraphExecutor
from fisedit.sparse.feature_cache import FeatureOverlay
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.reference import QUANTISED_DTYPES
from fisedit.values import LATENT_FACTOR, OnStep

if TYPE_CHECKING:
    from fisedit.evaluation.dense_search import DenseVariant
    from fisedit.evaluation.settings import SpeedSettings
    from fisedit.evaluation.workload import Workload
    from fisedit.history import EditResult
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import BoolGrid

Row = dict[str, Any]

BACKENDS = ("fast", "triton")
"""Torch's kernels, and Triton's, each in a graph."""

EDIT_STEPS = (20, 50)
"""Steps of whole edits."""

BATCHES = (1, 4, 16)
"""Edits in one batch, of `BATCH_AREA` of the picture each, in different places."""

BATCH_AREA = 0.05

STEP_REPEATS = 10
"""How many times more often a single step is timed than a whole edit."""

PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12)}
"""GPU -> (16-bit operations a second, bytes a second), from NVIDIA's data sheets of the SXM boards."""


def measure_edit_speed(settings: SpeedSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Time steps, decodes, whole edits and batches by captured graphs.

    Args:
        settings: of the benchmark.
        on_step: called before every measurement with (i, n, None).

    Returns:
        {"settings", "search", "dense", "rows", "batches", "summary", "notes"}, ready for JSON; times in seconds.

    Raises:
        InputError: there is no such GPU here.
        ModelError: the model cannot be loaded.
    """
    workload, masks = load_workload(settings), masks_of_areas(settings.areas, settings.size)
    total = len(masks) + len(BATCHES) + 1

    def report_progress(i: int) -> None:
        if on_step is not None:
            on_step(i, total, None)

    with torch.inference_mode():
        report_progress(0)
        pipelines = DensePipelines(workload.pipe, workload.config, compiled=settings.compiled)
        search = pipelines.search()
        benchmark = GraphBenchmark(workload, pipelines, search.best, settings.repeats)
        dense = benchmark.measure_dense(plain=settings.baseline)
        rows, batches = [], []
        for i, (name, area, grid) in enumerate(masks, 1):
            report_progress(i)
            rows.append({"mask": name, "asked_area": area, **benchmark.measure_mask(grid, dense)})
        for i, num_edits in enumerate(BATCHES, len(masks) + 1):
            report_progress(i)
            batches.append(benchmark.measure_batch(num_edits))
    return {
        "settings": _settings_dict(workload, settings) | {"dense_baseline": f"diffusers, {search.best.name}"},
        "search": search.as_dict(),
        "dense": dense,
        "rows": rows,
        "batches": batches,
        "summary": [_summary_row(row) for row in rows],
        "notes": [f"fastest dense run: {search.best.name}", *pipelines.notes],
    }


class GraphBenchmark:
    """One recorded source, the dense runs, and the captured graphs to compare with them.

    Args:
        workload: the model and its source.
        dense: pipelines of the dense runs.
        best: the fastest of them.
        repeats: timed calls of a whole edit; of a step `STEP_REPEATS` times as many.
    """

    def __init__(self, workload: Workload, dense: DensePipelines, best: DenseVariant, repeats: int) -> None:
        pipe, config = workload.pipe, workload.config
        self.dense, self.best = dense, best
        self.pipe, self.config, self.repeats, self.engine = pipe, config, repeats, Engine(pipe)
        self.device = pipe.unet.device
        self.costs = self.engine.costs(config)
        self.source = self.engine.run_dense(config, self.engine.encode(config), lambda *_: None)
        self.text = self.engine.encode(replace(config, prompt=PROMPTS[1]))
        self.middle = config.num_inference_steps // 2
        self.times = self.engine.sampler(config).timesteps
        self.editors: dict[tuple[str, int], Editor] = {}

    def measure_dense(self, *, plain: bool = True) -> Row:
        """The fastest dense run and, if asked, plain diffusers: a step, a decode and whole pictures."""
        row = self._measure_dense("dense", self.best)
        row["step_roofline_seconds"] = self._roofline(self.costs.dense_step())
        return row | (self._measure_dense("plain", DEFAULT_VARIANT) if plain else {})

    def _measure_dense(self, name: str, variant: DenseVariant) -> Row:
        step = self.dense.step(variant)
        row: Row = {f"{name}_step_seconds": self.median_seconds(step), f"{name}_kernels": self.count_kernels(step)}
        row[f"{name}_decode_seconds"] = self.median_seconds(self.dense.decode(variant))
        for steps in EDIT_STEPS:
            run = partial(self.dense.run, variant, steps)
            row[f"{name}_whole_{steps}_seconds"] = self.median_seconds(run, whole=True)
        return row

    def measure_mask(self, grid: BoolGrid, dense: Row) -> Row:
        """A step over one mask by every backend, and whole edits by the faster one.

        Args:
            grid: booleans [h, w].
            dense: the row of `measure_dense`.
        """
        plan = self.engine.row_plan(grid, STEP_DILATION)
        row: Row = {"area": float(grid.mean()), "active_rows": plan.rows, "growth": STEP_DILATION}
        row["step_roofline_seconds"] = self._roofline(self.costs.sparse_step(grid, STEP_DILATION))
        latents, time = self._guidance_batch(self.source.latents[self.middle]), self.times[self.middle]
        with ops.use("reference"):
            features = self.source.features[self.middle]
            expected, _ = self.engine.executor.run_sparse(latents, time, self.text, {}, FeatureOverlay(features, plan))
        for backend in BACKENDS:
            with ops.use(backend):
                measured = self._step(plan, latents, expected)
            row |= {f"{backend}_{name}": value for name, value in measured.items()}
        row["backend"] = best = min(BACKENDS, key=lambda name: float(row[f"{name}_step_seconds"]))
        with ops.use(best):
            for quantised_dtype in QUANTISED_DTYPES:
                measured = self._step(plan, latents, expected, quantised=quantised_dtype)
                row |= {f"{quantised_dtype}_{name}": value for name, value in measured.items()}
        for steps in EDIT_STEPS:
            row |= self.measure_edit(grid, steps, best)
        for name in ("dense", "plain"):
            if f"{name}_step_seconds" in dense:
                row[f"step_ratio_to_{name}"] = dense[f"{name}_step_seconds"] / row[f"{best}_step_seconds"]
                for whole in (f"whole_{steps}" for steps in EDIT_STEPS):
                    row[f"{whole}_ratio_to_{name}"] = dense[f"{name}_{whole}_seconds"] / row[f"{whole}_seconds"]
        return row

    def _step(self, plan: SparsePlan, latents: Tensor, expected: Tensor, *, quantised: str = "") -> Row:
        """One step, its keys and values perhaps in a byte a number; the error is relative to the engine's own."""
        features, executor = {self.middle: self.source.features[self.middle]}, self.engine.executor
        edit = GraphExecutor(executor, quantised=quantised).begin([plan], features, self.text)
        step = partial(edit.step, self.middle, latents, self.times[self.middle])
        actual = step()[:, : plan.rows[0]].float()
        return {
            "error": float((actual - expected).norm() / expected.float().norm()),
            "step_seconds": self.median_seconds(step),
            "kernels": self.count_kernels(step),
            "feature_bytes": edit.prefetcher.bytes,
        }

    def measure_edit(self, grid: BoolGrid, steps: int, backend: str) -> Row:
        """Whole edits by `Editor.edit`.

        Args:
            grid: booleans [h, w].
            steps: denoising steps.
            backend: one of `BACKENDS`.
        """
        editor, name = self._editor(backend, steps), f"whole_{steps}"
        with ops.use(backend):
            seconds = self.median_seconds(partial(self._edit, editor, grid), whole=True)
            stats = self._edit(editor, grid).stats
        return {
            f"{name}_seconds": seconds,
            f"{name}_stations": stats.seconds,
            f"{name}_captured": stats.unet_evaluations_captured,
            f"{name}_fallback": stats.fallback or stats.uncaptured,
        }

    def measure_batch(self, edits: int) -> Row:
        """A step and whole runs of several edits of one source in one batch, each a square in another place.

        Args:
            edits: in the batch.
        """
        side = self.config.height // LATENT_FACTOR
        grids = [np.roll(square_mask(BATCH_AREA, side), (4 * e, 7 * e), (0, 1)) for e in range(edits)]
        plans = [self.engine.row_plan(grid, STEP_DILATION) for grid in grids]
        text = self.text.repeat_interleave(edits, 0)
        latents = self._guidance_batch(self.source.latents[self.middle]).repeat_interleave(edits, 0)
        row: Row = {"edits": edits, "area": BATCH_AREA}
        features = {self.middle: self.source.features[self.middle]}
        for backend in BACKENDS:
            with ops.use(backend):
                edit = GraphExecutor(self.engine.executor).begin(plans, features, text)
                seconds = self.median_seconds(partial(edit.step, self.middle, latents, self.times[self.middle]))
            row[f"{backend}_step_seconds"], row[f"{backend}_edit_steps_a_second"] = seconds, edits / seconds
        row["backend"] = best = min(BACKENDS, key=lambda name: float(row[f"{name}_step_seconds"]))
        for steps in EDIT_STEPS:
            with ops.use(best):
                seconds = self.median_seconds(partial(self._edit_many, self._editor(best, steps), grids), whole=True)
            row[f"whole_{steps}_seconds"], row[f"whole_{steps}_edits_a_second"] = seconds, edits / seconds
        return row

    def median_seconds(self, call: Callable[[], object], *, whole: bool = False) -> float:
        """Median seconds of a call after warm-up.

        Args:
            call: what is timed.
            whole: whether it is a whole edit, which is repeated less often.
        """
        repeats = self.repeats if whole else STEP_REPEATS * self.repeats
        for _ in range(2 if whole else 3):
            call()
        return median(self._seconds(call) for _ in range(repeats))

    def _seconds(self, call: Callable[[], object]) -> float:
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

    def count_kernels(self, call: Callable[[], object]) -> int:
        """Kernels that a call launches; 0 on a CPU."""
        from torch.profiler import ProfilerActivity, profile

        if self.device.type != "cuda":
            return 0
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        names = (e.name for e in profiler.events() if e.device_type.name == "CUDA")
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)

    def _editor(self, backend: str, steps: int) -> Editor:
        """An editor whose current result is a source of so many steps. Graphs belong to one set of kernels."""
        if (backend, steps) not in self.editors:
            same_backend = next((e for (name, _), e in self.editors.items() if name == backend), None)
            editor = same_backend.beside() if same_backend else Editor(self.pipe, graphs=True)
            config = self.config
            self.editors[backend, steps] = editor
            editor.generate(
                config.prompt,
                seed=config.seed,
                num_inference_steps=steps,
                guidance_scale=config.guidance_scale,
                width=config.width,
                height=config.height,
            )
        return self.editors[backend, steps]

    def _edit(self, editor: Editor, grid: BoolGrid) -> EditResult:
        """One edit of the source, deleted from the history at once."""
        result = editor.edit(PROMPTS[1], mask=grid)
        editor.delete(result.id)
        return result

    def _edit_many(self, editor: Editor, grids: Sequence[BoolGrid]) -> tuple[EditResult, ...]:
        results = editor.edit_many([PROMPTS[1]] * len(grids), grids)
        for result in results:
            editor.delete(result.id)
        return results

    def _guidance_batch(self, latents: Tensor) -> Tensor:
        return torch.cat([latents] * self.engine.batch(self.config))

    def _roofline(self, macs: int) -> float | None:
        """Lower bound in seconds: arithmetic at the peak rate, or one read of the weights."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        for chip, (operations, bandwidth) in PEAKS.items():
            if chip in name:
                weights = sum(int(p.nbytes) for p in self.pipe.unet.parameters())
                return float(max(2 * macs / operations, weights / bandwidth))
        return None


def _summary_row(row: Row) -> Row:
    """The row of the short table."""
    best = row["backend"]
    shown = {"mask": row["mask"], "area": f"{row['area']:.1%}", "kernels by": best}
    shown["step"] = f"{row[f'{best}_step_seconds'] * 1000:.2f} ms"
    if row["step_roofline_seconds"]:
        shown["roofline"] = f"{row['step_roofline_seconds'] * 1000:.2f} ms"
    shown["launched"] = str(row[f"{best}_kernels"])
    for name in ("dense", "plain"):
        for stage in ("step", *(f"whole_{steps}" for steps in EDIT_STEPS)):
            if f"{stage}_ratio_to_{name}" in row:
                shown[f"{stage} over {name}".replace("_", " ")] = f"{row[f'{stage}_ratio_to_{name}']:.1f}x"
    return shown | {"error": f"{row[f'{best}_error']:.1e}"}


def _settings_dict(workload: Workload, settings: SpeedSettings) -> dict[str, Any]:
    import diffusers
    import triton

    config = workload.config
    return {
        "model": settings.model or "SD 1.5 architecture, random weights",
        "pixels": config.width,
        "num_inference_steps": config.num_inference_steps,
        "whole_steps": EDIT_STEPS,
        "guidance_scale": config.guidance_scale,
        "scheduler": config.scheduler.value,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "step_growth": STEP_DILATION,
        "cache": "warm: the source is recorded, in the GPU's memory; graphs are captured before timing",
        "whole": "from prompt to picture by Editor.edit, text and decode included; the mask is given",
        "repeats": settings.repeats,
        "versions": {"cuda": torch.version.cuda, "triton": triton.__version__, "diffusers": diffusers.__version__},
    }
