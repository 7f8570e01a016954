"""`fisedit bench edit --device cuda`: edits by captured graphs beside the fastest dense run of one GPU.

That run is searched for (`dense_search`). The fastest eager and compiled runs of diffusers take turns too, and
DeepCache over both, which leaves out layers. Steps are timed alone as well, with every set of kernels, beside plain
diffusers' (float32, contiguous, eager). All are timed by device events; ratios are of the same turn. Masks are given,
weights are those of SD 1.5's shapes, and the source is recorded. Steps are compared with the engine's own by the
reference kernels in the same precision; shallow ones are timed beside them. Whole edits are `Editor.edit`, from prompt
to picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fisedit.bench.dense_pipelines import DensePipelines
from fisedit.bench.dense_search import DEEPCACHE, DEFAULT_VARIANT
from fisedit.bench.timing import interval, interval_text, ratio
from fisedit.bench.workload import PROMPTS, STEP_DILATION, load_workload, masks_of_areas, square_mask
from fisedit.editor import Editor
from fisedit.features.cache import FeatureOverlay, StepFeatures
from fisedit.runners.cuda_graphs import GraphExecutor
from fisedit.runners.deep_maps import DeepMaps
from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.sparse_kernels import ops
from fisedit.values import LATENT_FACTOR, OnStep

if TYPE_CHECKING:
    from fisedit.bench.dense_search import DenseSearch, DenseVariant
    from fisedit.bench.settings import SpeedSettings
    from fisedit.bench.workload import Workload
    from fisedit.history import EditResult
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import BoolGrid

Row = dict[str, Any]
Mask = tuple[str, float, "BoolGrid"]

BACKENDS = ("fast", "triton")
"""The default, whose kernels are torch's or Triton's by measurement, and Triton's alone; each in a graph."""

MANY_STEPS = 2.5
"""Whole edits are timed with the settings' steps, and with so many times as many: 20 and 50."""

BATCHES = (1, 16)
"""Edits in one batch, of `BATCH_AREA` of the picture each, in different places."""

BATCH_AREA = 0.05

STEP_REPEATS = 10
"""Calls of a step in one turn."""

OVER = {
    "dense": "over the fastest",
    "eager": "over eager",
    "compiled": "over compiled",
    "deepcache_eager": "over DeepCache",
    "deepcache_compiled": "over compiled DeepCache",
    "plain": "over plain",
}
"""Dense run -> the end of its columns' names."""

LATE = "deepcache_compiled"
"""The run that is compiled when everything else is measured: a minute's work."""

PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.0e12)}
"""GPU -> (16-bit operations a second, bytes a second), from NVIDIA's data sheets of the SXM boards."""


def measure_edit_speed(
    settings: SpeedSettings, on_step: OnStep | None = None, on_report: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Time steps, whole edits and batches by captured graphs.

    Args:
        settings: The settings of the benchmark.
        on_step: called before every measurement with (i, n, None).
        on_report: called with the report as far as it is, after the search and every measurement but the last.

    Returns:
        {"settings", "search", "dense", "rows", "shallow", "batches", "summary", "notes"} and short tables, ready for
        JSON; times in seconds.

    Raises:
        InputError: there is no such GPU here.
        ModelError: the model cannot be loaded.
    """
    workload, masks = load_workload(settings), masks_of_areas(settings.areas, settings.size)
    with torch.inference_mode():
        if on_step is not None:
            on_step(0, 1, None)
        pipelines = DensePipelines(workload.pipe, workload.config, compiled=settings.compiled)
        search = pipelines.search()
        benchmark = GraphBenchmark(workload, pipelines, search, settings.repeats, plain=settings.baseline)
        stages, done = benchmark.stages(masks), 0

        def report() -> dict[str, Any]:
            stopped = () if done == len(stages) else (f"stopped after {done} of {len(stages)} measurements",)
            names: Row = {"dense_baseline": f"diffusers, {search.best.name}", "whole_backend": benchmark.backend}
            names |= {"whole_steps": benchmark.steps}
            return {
                "settings": _settings_dict(workload, settings) | names,
                "search": search.as_dict(),
                "dense": {"step_roofline_seconds": benchmark.roofline(benchmark.costs.dense_step())},
                "rows": benchmark.rows,
                "shallow": benchmark.shallow,
                "batches": benchmark.batches,
                "summary": [_summary_row(row) for row in benchmark.rows],
                "shallow_summary": [_shallow_row(row) for row in benchmark.shallow],
                "batch_summary": [_batch_row(row) for row in benchmark.batches],
                "notes": [*benchmark.notes, *pipelines.notes, *stopped],
            }

        with suppress(KeyboardInterrupt):
            for done, stage in enumerate(stages):
                if on_report is not None:
                    on_report(report())
                if on_step is not None:
                    on_step(done + 1, len(stages) + 1, None)
                stage()
            done = len(stages)
        return report()


def baselines_of(search: DenseSearch) -> dict[str, DenseVariant]:
    """The dense runs to compare with, by their names in `OVER`; the fastest exact one is "dense" alone.

    Args:
        search: The result of the search.
    """
    found = {"eager": search.fastest_eager}
    if compiled := search.fastest_compiled:
        found["compiled"] = compiled
    found |= {f"deepcache_{name}": replace(variant, runtime=DEEPCACHE) for name, variant in found.items()}
    return {"dense": search.best} | {name: variant for name, variant in found.items() if variant != search.best}


class GraphBenchmark:
    """One recorded source, the dense runs, and the captured graphs to compare with them.

    Args:
        workload: the model and its source.
        dense: pipelines of the dense runs.
        search: The result of their search.
        repeats: turns.
        plain: whether a step of plain diffusers is timed too.

    Attributes:
        rows: The figures of every mask so far.
        shallow: The figures of a shallow step over every mask so far.
        batches: The figures of every number of edits so far.
        notes: what a reader of them must know.
    """

    def __init__(
        self, workload: Workload, dense: DensePipelines, search: DenseSearch, repeats: int, *, plain: bool = True
    ) -> None:
        pipe, config = workload.pipe, workload.config
        self.dense, self.baselines = dense, baselines_of(search)
        shortage = dense.shortage(DEFAULT_VARIANT) if plain else ""
        self.plain = plain and not shortage
        self.pipe, self.config, self.repeats, self.engine = pipe, config, repeats, Engine(pipe)
        self.device = pipe.unet.device
        self.costs = self.engine.costs(config)
        self.source = denoise.run_dense(self.engine, config, self.engine.encode(config), lambda *_: None)
        self.text = self.engine.encode(replace(config, prompt=PROMPTS[1]))
        self.middle = config.num_inference_steps // 2
        self.times = self.engine.sampler(config).timesteps
        self.steps = config.num_inference_steps, int(MANY_STEPS * config.num_inference_steps)
        self.backends = BACKENDS if self.device.type == "cuda" else BACKENDS[:1]
        self.editors: dict[tuple[str, int], Editor] = {}
        self.rows: list[Row] = []
        self.shallow: list[Row] = []
        self.batches: list[Row] = []
        self.notes = [f"{OVER[name]}: {variant.name}" for name, variant in self.baselines.items()]
        self.notes += [f"plain diffusers was not timed: {shortage}"] if shortage else []
        self._refused: dict[str, bool] = {}

    @property
    def backend(self) -> str:
        """The set of kernels whose steps are the fastest ones so far; whole edits and batches run by it."""
        total = {name: sum(row[f"{name}_step_seconds"]["median"] for row in self.rows) for name in self.backends}
        return min(total, key=lambda name: total[name])

    def stages(self, masks: Sequence[Mask]) -> list[Callable[[], None]]:
        """The measurements in their order: squares, batches, compiled DeepCache, and other masks.

        Args:
            masks: kind, asked area and booleans [h, w] of each.
        """
        squares, others = ([mask for mask in masks if (mask[0] == "square") is square] for square in (True, False))
        early = [name for name in self.baselines if name != LATE]
        late = [partial(self.measure_whole, squares, n, [LATE]) for n in self.steps if LATE in self.baselines]
        by_kind = [
            [
                *(partial(self.measure_step, *mask) for mask in kind),
                *(partial(self.measure_whole, kind, n, early) for n in self.steps if kind),
            ]
            for kind in (squares, others)
        ]
        return [*by_kind[0], *(partial(self.measure_batch, count) for count in BATCHES), *late, *by_kind[1]]

    def measure_step(self, kind: str, area: float, grid: BoolGrid) -> None:
        """A step over one mask by every backend, in turns with dense ones and shallow ones; a row of its own each.

        Args:
            kind: The kind of the mask.
            area: The area that was asked for.
            grid: booleans [h, w].
        """
        plan = self.engine.row_plan(grid, STEP_DILATION)
        row: Row = {"mask": kind, "asked_area": area, "area": float(grid.mean())}
        shallow = dict(row)
        row |= {"active_rows": plan.rows, "growth": STEP_DILATION}
        row["step_roofline_seconds"] = self.roofline(self.costs.sparse_step(grid, STEP_DILATION))
        exact = {name: v for name, v in self.baselines.items() if v.is_exact}
        exact |= {"plain": DEFAULT_VARIANT} if self.plain else {}
        steps = {f"{backend}_step": self._step(plan, backend, row) for backend in self.backends}
        shallow_steps = {
            f"{backend}_shallow": self._step(plan, backend, shallow, shallow=True) for backend in self.backends
        }
        dense_steps = {f"{name}_step": self.dense.step(variant) for name, variant in exact.items()}
        samples = self.turns(dense_steps | steps | shallow_steps)
        row |= {f"{name}_seconds": interval(samples[name]).as_dict() for name in dense_steps | steps}
        best = min(self.backends, key=lambda name: row[f"{name}_step_seconds"]["median"])
        row |= {"backend": best, "kernels": self.count_kernels(steps[f"{best}_step"])}
        row["step_seconds"] = row[f"{best}_step_seconds"]
        for name in exact:
            row[f"step_ratio_to_{name}"] = ratio(samples[f"{name}_step"], samples[f"{best}_step"]).as_dict()
        self.rows.append(row)
        taken = samples[f"{best}_shallow"]
        shallow |= {"backend": best, "kernels": self.count_kernels(shallow_steps[f"{best}_shallow"])}
        shallow |= {"step_seconds": interval(taken).as_dict()}
        shallow |= {"full_step_ratio_to_shallow": ratio(samples[f"{best}_step"], taken).as_dict()}
        self.shallow.append(shallow)

    def measure_whole(self, masks: Sequence[Mask], steps: int, names: Sequence[str]) -> None:
        """Whole edits of so many steps in turns with the dense runs, into the rows of their masks.

        Args:
            masks: those of which steps were measured.
            steps: The steps of the edits.
            names: the dense runs, of which those that cannot run are left out with a note.
        """
        runs = [name for name in names if not self._is_refused(name)]
        if not runs:
            return
        calls: dict[str, Callable[[], object]] = {
            f"{name}_whole": partial(self.dense.run, self.baselines[name], steps) for name in runs
        }
        rows = {f"whole of {row['mask']} {row['asked_area']}": row for row in self.rows}
        editor = self._editor(steps)
        edits = {f"whole of {kind} {area}": partial(self._edit, editor, grid) for kind, area, grid in masks}
        with ops.use(self.backend):
            samples = self.turns(calls | edits)
            stats = {name: edit().stats for name, edit in edits.items()}
        for name, found in stats.items():
            whole = f"whole_{steps}"
            rows[name].setdefault(f"{whole}_seconds", interval(samples[name]).as_dict())
            rows[name] |= {f"{whole}_stations": found.seconds, f"{whole}_captured": found.unet_evaluations_captured}
            rows[name][f"{whole}_fallback"] = found.fallback or found.uncaptured
            for run in runs:
                rows[name][f"{run}_{whole}_seconds"] = interval(samples[f"{run}_whole"]).as_dict()
                rows[name][f"{whole}_ratio_to_{run}"] = ratio(samples[f"{run}_whole"], samples[name]).as_dict()

    def _is_refused(self, name: str) -> bool:
        if name not in self._refused:
            variant = self.baselines[name]
            reason = "" if variant.is_exact else self.dense.refusal(variant)
            self._refused[name] = bool(reason)
            self.notes += [f"{variant.name} was left out: {reason}"] if reason else []
        return self._refused[name]

    def _step(self, plan: SparsePlan, backend: str, row: Row, *, shallow: bool = False) -> Callable[[], Tensor]:
        """One captured step. Its error, relative to the engine's own by the reference kernels, goes into the row."""
        features = {self.middle: self.source.features[self.middle]}
        latents, time = self._guidance_batch(self.source.latents[self.middle]), self.times[self.middle]
        overlay, changes = FeatureOverlay(features[self.middle], plan), list[Tensor]()
        if shallow:
            deep_maps, before = DeepMaps(self.engine.executor.shallow), self.source.features[self.middle - 1]
            assert isinstance(before, StepFeatures)
            deep_maps.keep_dense(self.middle - 1, before, before)
            deep_maps.begin(self.middle, overlay)
            changes.append(deep_maps.change(self.middle, plan))
        with ops.use("reference"):
            expected, _ = self.engine.executor.run_sparse(latents, time, self.text, {}, overlay)
        with ops.use(backend):
            edit = GraphExecutor(self.engine.executor).begin([plan], features, self.text, shallow=shallow)
            actual = edit.step(self.middle, latents, time, changes)[:, : plan.rows[0]].float()
        row[f"{backend}_error"] = float((actual - expected).norm() / expected.float().norm())
        row["feature_bytes"] = edit.prefetcher.bytes
        return partial(edit.step, self.middle, latents, time, changes)

    def measure_batch(self, count: int) -> None:
        """A step and whole runs of several edits of one source in one batch, in turns with those of one.

        Args:
            count: The number of edits, each a square in another place.
        """
        row: Row = {"edits": count, "area": BATCH_AREA, "backend": self.backend}
        with ops.use(self.backend):
            calls = {n: self._batch_calls(n) for n in {1, count}}
            for stage in calls[count]:
                samples = self.turns({f"{n} {stage}": calls[n][stage] for n in calls})
                of, one = samples[f"{count} {stage}"], samples[f"1 {stage}"]
                row[f"{stage}_seconds"] = interval(of).as_dict()
                row[f"{stage}_rate_ratio"] = interval([count * a / b for a, b in zip(one, of, strict=True)]).as_dict()
        self.batches.append(row)

    def _batch_calls(self, count: int) -> dict[str, Callable[[], object]]:
        side, latents = self.config.height // LATENT_FACTOR, self._guidance_batch(self.source.latents[self.middle])
        grids = [np.roll(square_mask(BATCH_AREA, side), (4 * e, 7 * e), (0, 1)) for e in range(count)]
        plans = [self.engine.row_plan(grid, STEP_DILATION) for grid in grids]
        features = {self.middle: self.source.features[self.middle]}
        edit = GraphExecutor(self.engine.executor).begin(plans, features, self.text.repeated(count))
        many = latents.repeat_interleave(count, 0)
        return {"step": partial(edit.step, self.middle, many, self.times[self.middle])} | {
            f"whole_{steps}": partial(self._edit_many, self._editor(steps), grids) for steps in self.steps
        }

    def turns(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Seconds of every call in every turn, after two warm-ups; short calls are repeated within a turn.

        Args:
            calls: by name.
        """
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(-2, self.repeats):
            for name, call in calls.items():
                once = turn < 0 or "whole" in name or "plain" in name
                seconds = self._seconds(call, 1 if once else STEP_REPEATS)
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

    def _editor(self, steps: int) -> Editor:
        """An editor whose current result is a source of so many steps. Graphs belong to one set of kernels."""
        backend = self.backend
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


def _summary_row(row: Row) -> Row:
    """The row of the short table."""
    shown = {"mask": row["mask"], "area": f"{row['area']:.1%}", "kernels by": row["backend"]}
    shown["step"] = interval_text(_milliseconds(row["step_seconds"]), " ms")
    if row["step_roofline_seconds"]:
        shown["roofline"] = f"{row['step_roofline_seconds'] * 1000:.2f} ms"
    shown["kernels"] = str(row["kernels"])
    for name, title in OVER.items():
        for stage in _stages(row):
            if f"{stage}_ratio_to_{name}" in row:
                column = f"{stage.replace('whole_', 'whole, steps: ')}, {title}"
                shown[column] = interval_text(row[f"{stage}_ratio_to_{name}"])
    return shown | {"error": f"{row[row['backend'] + '_error']:.1e}"}


def _shallow_row(row: Row) -> Row:
    """The row of the short table of shallow steps."""
    return {
        "shallow steps of": row["mask"],
        "area": f"{row['area']:.1%}",
        "kernels by": row["backend"],
        "step": interval_text(_milliseconds(row["step_seconds"]), " ms"),
        "kernels": str(row["kernels"]),
        "over a full step": interval_text(row["full_step_ratio_to_shallow"]),
        "error": f"{row[row['backend'] + '_error']:.1e}",
    }


def _batch_row(row: Row) -> Row:
    """The row of the short table of batches."""
    shown = {"edits": row["edits"], "step": interval_text(_milliseconds(row["step_seconds"]), " ms")}
    for stage in _stages(row):
        title = f"{stage.replace('whole_', 'whole, steps: ')}, edits a second over one at a time"
        shown[title] = interval_text(row[f"{stage}_rate_ratio"])
    return shown


def _stages(row: Row) -> list[str]:
    """Return what was measured for a row: "step" and "whole_20", say."""
    names = (key.removesuffix("_seconds") for key in row if key.endswith("_seconds"))
    return [name for name in names if name == "step" or name.startswith("whole_")]


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
        "guidance_scale": config.guidance_scale,
        "scheduler": config.scheduler.value,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "step_growth": STEP_DILATION,
        "cache": "warm: the source is recorded, in the GPU's memory; graphs are captured before timing",
        "whole": "from prompt to picture by Editor.edit, text and decode included; the mask is given",
        "repeats": settings.repeats,
        "versions": {"cuda": torch.version.cuda, "triton": triton.__version__, "diffusers": diffusers.__version__},
    }
