"""`fisedit bench edit --device cuda`: edits by captured graphs beside the fastest dense run of one GPU.

That run is searched for (`dense_search`). Plain diffusers (float32, contiguous, eager) is timed beside it, and whole
runs of DeepCache, which leaves out layers. All take turns, timed by device events; ratios are of the same turn. Masks
are given, weights are those of SD 1.5's shapes, and the source is recorded. Steps are timed alone, with every set of
kernels. They are compared with the engine's own by the reference kernels in the same precision. Whole edits are
`Editor.edit`, from prompt to picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fisedit.bench.dense_pipelines import DensePipelines
from fisedit.bench.dense_search import DEFAULT_VARIANT
from fisedit.bench.timing import interval, interval_text, ratio
from fisedit.bench.workload import PROMPTS, STEP_DILATION, load_workload, masks_of_areas, square_mask
from fisedit.editor import Editor
from fisedit.features.cache import FeatureOverlay
from fisedit.runners.cuda_graphs import GraphExecutor
from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.sparse_kernels import ops
from fisedit.values import LATENT_FACTOR, OnStep

if TYPE_CHECKING:
    from fisedit.bench.dense_search import DenseVariant
    from fisedit.bench.settings import SpeedSettings
    from fisedit.bench.workload import Workload
    from fisedit.history import EditResult
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import BoolGrid

Row = dict[str, Any]

BACKENDS = ("fast", "triton")
"""The default, whose kernels are torch's or Triton's by measurement, and Triton's alone; each in a graph."""

EDIT_STEPS = (20, 50)
"""Steps of whole edits."""

BATCHES = (1, 4, 16)
"""Edits in one batch, of `BATCH_AREA` of the picture each, in different places."""

BATCH_AREA = 0.05

STEP_REPEATS = 10
"""Calls of a step, or of a decode, in one turn."""

OVER = {"dense": "over the fastest", "deepcache": "over DeepCache", "openvino": "over OpenVINO", "plain": "over plain"}
"""Dense run -> the end of its columns' names."""

PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12)}
"""GPU -> (16-bit operations a second, bytes a second), from NVIDIA's data sheets of the SXM boards."""


def measure_edit_speed(
    settings: SpeedSettings, on_step: OnStep | None = None, on_report: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Time steps, decodes, whole edits and batches by captured graphs.

    Args:
        settings: The settings of the benchmark.
        on_step: called before every measurement with (i, n, None).
        on_report: called with the report as far as it is, after the batches and after every mask but the last.

    Returns:
        {"settings", "search", "dense", "rows", "batches", "summary", "notes"}, ready for JSON; times in seconds.

    Raises:
        InputError: there is no such GPU here.
        ModelError: the model cannot be loaded.
    """
    workload, masks = load_workload(settings), masks_of_areas(settings.areas, settings.size)

    def report_progress(i: int) -> None:
        if on_step is not None:
            on_step(i, len(masks) + 2, None)

    rows: list[Row] = []
    with torch.inference_mode():
        report_progress(0)
        pipelines = DensePipelines(workload.pipe, workload.config, compiled=settings.compiled)
        search = pipelines.search()
        others = pipelines.others(search)
        benchmark = GraphBenchmark(workload, pipelines, search.best, settings.repeats, plain=settings.baseline)
        benchmark.others = [variant for variant, reason in others.items() if not reason]
        report_progress(1)
        batches = benchmark.measure_batches()

        def report() -> dict[str, Any]:
            stopped = () if len(rows) == len(masks) else (f"stopped after {len(rows)} of {len(masks)} masks",)
            baseline = {"dense_baseline": f"diffusers, {search.best.name}"}
            return {
                "settings": _settings_dict(workload, settings) | baseline,
                "search": search.as_dict(),
                "dense": {"step_roofline_seconds": benchmark.roofline(benchmark.costs.dense_step())},
                "rows": rows,
                "batches": batches,
                "summary": [_summary_row(row) for row in rows],
                "batch_summary": [_batch_row(row) for row in batches],
                "notes": [
                    f"fastest exact run: {search.best.name}",
                    *(f"{variant.name}: {reason or 'timed in turns'}" for variant, reason in others.items()),
                    *pipelines.notes,
                    *stopped,
                ],
            }

        with suppress(KeyboardInterrupt):
            for i, (name, area, grid) in enumerate(masks, 2):
                if on_report is not None:
                    on_report(report())
                report_progress(i)
                rows.append({"mask": name, "asked_area": area, **benchmark.measure_mask(grid)})
        return report()


class GraphBenchmark:
    """One recorded source, the dense runs, and the captured graphs to compare with them.

    Args:
        workload: the model and its source.
        dense: pipelines of the dense runs.
        best: the fastest of them.
        repeats: turns.
        plain: whether plain diffusers is timed too.
    """

    def __init__(
        self, workload: Workload, dense: DensePipelines, best: DenseVariant, repeats: int, *, plain: bool = True
    ) -> None:
        pipe, config = workload.pipe, workload.config
        self.dense, self.best, self.plain = dense, best, plain
        self.others: list[DenseVariant] = []
        self.pipe, self.config, self.repeats, self.engine = pipe, config, repeats, Engine(pipe)
        self.device = pipe.unet.device
        self.costs = self.engine.costs(config)
        self.source = denoise.run_dense(self.engine, config, self.engine.encode(config), lambda *_: None)
        self.text = self.engine.encode(replace(config, prompt=PROMPTS[1]))
        self.middle = config.num_inference_steps // 2
        self.times = self.engine.sampler(config).timesteps
        self.editors: dict[tuple[str, int], Editor] = {}

    def dense_calls(self) -> dict[str, Callable[[], object]]:
        """A step, a decode and pictures of the fastest exact run, and of others as far as they are timed."""
        whole = {"dense": self.best} | {variant.runtime.lower(): variant for variant in self.others}
        calls: dict[str, Callable[[], object]] = {
            f"{name}_whole_{steps}": partial(self.dense.run, variant, steps)
            for name, variant in whole.items()
            for steps in EDIT_STEPS
        }
        for name, variant in {"dense": self.best, **({"plain": DEFAULT_VARIANT} if self.plain else {})}.items():
            calls[f"{name}_step"], calls[f"{name}_decode"] = self.dense.step(variant), self.dense.decode(variant)
        return calls

    def measure_mask(self, grid: BoolGrid) -> Row:
        """A step over one mask by every backend, and whole edits by the faster one, in turns with the dense runs.

        Args:
            grid: booleans [h, w].
        """
        plan = self.engine.row_plan(grid, STEP_DILATION)
        row: Row = {"area": float(grid.mean()), "active_rows": plan.rows, "growth": STEP_DILATION}
        row["step_roofline_seconds"] = self.roofline(self.costs.sparse_step(grid, STEP_DILATION))
        steps = {f"{backend}_step": self._step(plan, backend, row) for backend in BACKENDS}
        best = min(BACKENDS, key=lambda name: median(self.turns({name: steps[f"{name}_step"]})[name]))
        row |= {"backend": best, "kernels": self.count_kernels(steps[f"{best}_step"])}
        edits = {f"whole_{n}": partial(self._edit, self._editor(best, n), grid) for n in EDIT_STEPS}
        with ops.use(best):
            samples = self.turns(self.dense_calls() | steps | edits)
            for name, edit in edits.items():
                stats = edit().stats
                row |= {f"{name}_stations": stats.seconds, f"{name}_captured": stats.unet_evaluations_captured}
                row[f"{name}_fallback"] = stats.fallback or stats.uncaptured
        samples["step"] = samples[f"{best}_step"]
        return row | _intervals(samples)

    def _step(self, plan: SparsePlan, backend: str, row: Row) -> Callable[[], Tensor]:
        """One captured step. Its error, relative to the engine's own by the reference kernels, goes into the row."""
        features = {self.middle: self.source.features[self.middle]}
        latents, time = self._guidance_batch(self.source.latents[self.middle]), self.times[self.middle]
        with ops.use("reference"):
            overlay = FeatureOverlay(features[self.middle], plan)
            expected, _ = self.engine.executor.run_sparse(latents, time, self.text, {}, overlay)
        with ops.use(backend):
            edit = GraphExecutor(self.engine.executor).begin([plan], features, self.text)
            actual = edit.step(self.middle, latents, time)[:, : plan.rows[0]].float()
        row[f"{backend}_error"] = float((actual - expected).norm() / expected.float().norm())
        row["feature_bytes"] = edit.prefetcher.bytes
        return partial(edit.step, self.middle, latents, time)

    def measure_batches(self) -> list[Row]:
        """A step and whole runs of several edits of one source in one batch, each a square in another place."""
        side, rows = self.config.height // LATENT_FACTOR, []
        calls: dict[str, Callable[[], object]] = {}
        latents = self._guidance_batch(self.source.latents[self.middle])
        features, (backend, *_) = {self.middle: self.source.features[self.middle]}, BACKENDS
        with ops.use(backend):
            for count in BATCHES:
                grids = [np.roll(square_mask(BATCH_AREA, side), (4 * e, 7 * e), (0, 1)) for e in range(count)]
                plans = [self.engine.row_plan(grid, STEP_DILATION) for grid in grids]
                text, many = self.text.repeated(count), latents.repeat_interleave(count, 0)
                edit = GraphExecutor(self.engine.executor).begin(plans, features, text)
                calls[f"{count}_step"] = partial(edit.step, self.middle, many, self.times[self.middle])
                for steps in EDIT_STEPS:
                    editor = self._editor(backend, steps)
                    calls[f"{count}_whole_{steps}"] = partial(self._edit_many, editor, grids)
            samples = self.turns(calls)
        for count in BATCHES:
            row: Row = {"edits": count, "area": BATCH_AREA, "backend": backend}
            for stage in ("step", *(f"whole_{steps}" for steps in EDIT_STEPS)):
                of, one = samples[f"{count}_{stage}"], samples[f"{BATCHES[0]}_{stage}"]
                row[f"{stage}_seconds"] = interval(of).as_dict()
                row[f"{stage}_rate_ratio"] = interval([count * a / b for a, b in zip(one, of, strict=True)]).as_dict()
            rows.append(row)
        return rows

    def turns(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Seconds of every call in every turn, after two warm-ups; steps and decodes are repeated within a turn.

        Args:
            calls: by name.
        """
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(-2, self.repeats):
            for name, call in calls.items():
                seconds = self._seconds(call, 1 if "whole" in name or turn < 0 else STEP_REPEATS)
                if turn >= 0:
                    samples[name].append(seconds)
        return samples

    def _seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Seconds of one of some calls in a row, by device events."""
        if self.device.type != "cuda":
            start = perf_counter()
            for _ in range(repeats):
                call()
            return (perf_counter() - start) / repeats
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / repeats

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

    def roofline(self, macs: int) -> float | None:
        """Lower bound in seconds: arithmetic at the peak rate, or one read of the weights."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        for chip, (operations, bandwidth) in PEAKS.items():
            if chip in name:
                weights = sum(int(p.nbytes) for p in self.pipe.unet.parameters())
                return float(max(2 * macs / operations, weights / bandwidth))
        return None


def _intervals(samples: dict[str, list[float]]) -> Row:
    """Medians and ranges of seconds, and of the ratios over the dense runs of the same turns. Plain diffusers' whole
    runs are their steps and their decode."""
    stages = {"step": samples["step"], **{f"whole_{n}": samples[f"whole_{n}"] for n in EDIT_STEPS}}
    if "plain_step" in samples:
        both = list(zip(samples["plain_step"], samples["plain_decode"], strict=True))
        samples = samples | {f"plain_whole_{n}": [n * step + decode for step, decode in both] for n in EDIT_STEPS}
    row: Row = {f"{name}_seconds": interval(seconds).as_dict() for name, seconds in samples.items()}
    for stage, seconds in stages.items():
        for name in OVER:
            if f"{name}_{stage}" in samples:
                row[f"{stage}_ratio_to_{name}"] = ratio(samples[f"{name}_{stage}"], seconds).as_dict()
    return row


def _summary_row(row: Row) -> Row:
    """The row of the short table."""
    shown = {"mask": row["mask"], "area": f"{row['area']:.1%}", "kernels by": row["backend"]}
    shown["step"] = interval_text(_milliseconds(row["step_seconds"]), " ms")
    if row["step_roofline_seconds"]:
        shown["roofline"] = f"{row['step_roofline_seconds'] * 1000:.2f} ms"
    shown["kernels"] = str(row["kernels"])
    for name, title in OVER.items():
        for stage in ("step", *(f"whole_{steps}" for steps in EDIT_STEPS)):
            if f"{stage}_ratio_to_{name}" in row:
                column = f"{stage.replace('whole_', 'whole, steps: ')}, {title}"
                shown[column] = interval_text(row[f"{stage}_ratio_to_{name}"])
    return shown | {"error": f"{row[row['backend'] + '_error']:.1e}"}


def _batch_row(row: Row) -> Row:
    """The row of the short table of batches."""
    shown = {"edits": row["edits"], "step": interval_text(_milliseconds(row["step_seconds"]), " ms")}
    for stage in ("step", *(f"whole_{steps}" for steps in EDIT_STEPS)):
        title = f"{stage.replace('whole_', 'whole, steps: ')}, edits a second over one at a time"
        shown[title] = interval_text(row[f"{stage}_rate_ratio"])
    return shown


def _milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value * 1000 for name, value in seconds.items()}


def _settings_dict(workload: Workload, settings: SpeedSettings) -> dict[str, Any]:
    import diffusers
    import triton

    config = workload.config
    return {
        "model": workload.model_name(settings),
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
