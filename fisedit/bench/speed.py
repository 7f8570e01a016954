"""`fisedit bench edit`: what an edit costs beside the fastest dense run of this machine, in turns, in one process.

The fastest exact run is searched for first (`dense_search`); every ratio is over it. The other baselines take turns:
the fastest of torch, OpenVINO, and DeepCache, which leaves out layers. The fastest of any kind is the second baseline
of whole edits. Steps and decodes of plain diffusers (float32, contiguous, eager) take turns too; its whole run is
counted from them. Masks are given, so mask prediction is not measured. On a GPU that was asked for, `cuda_speed`
measures captured graphs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fisedit.bench.dense_pipelines import DensePipelines
from fisedit.bench.dense_search import (
    DEFAULT_VARIANT,
    TITLES,
    baseline_rows,
    baseline_settings,
    dense_summary,
    fastest_call,
    whole_runs,
)
from fisedit.bench.timing import Calls, interval, interval_text, peak_memory, ratio, seconds_by_round
from fisedit.bench.workload import PROMPTS, STEP_DILATION, load_workload, masks_of_areas
from fisedit.decoder.decode import decode, decode_sparse
from fisedit.diagnosis.profile import profiled
from fisedit.editor import Editor
from fisedit.features.cache import FeatureOverlay
from fisedit.features.codec import choose_encoding
from fisedit.machine.flops import count_flops
from fisedit.machine.malloc import keep_freed_memory
from fisedit.sampling.engine import Engine
from fisedit.values import OnStep, Quality

if TYPE_CHECKING:
    from fisedit.bench.dense_search import DenseVariant
    from fisedit.bench.settings import SpeedSettings
    from fisedit.bench.workload import Workload
    from fisedit.values import BoolGrid


def measure_edit_speed(settings: SpeedSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Search for the fastest dense run, and time steps, decodes and whole edits in turns with it.

    Args:
        settings: The settings of the benchmark.
        on_step: called before the search, the warm-up and every round with (i, n, None).

    Returns:
        {"settings", "search", "dense", "baselines", "rows", "dense_summary", "summary", "notes"}, ready for JSON; times
        in seconds, ratios over the dense runs of the same round.

    Raises:
        InputError: the device is not on this machine.
        ModelError: the model cannot be loaded.
    """
    keep_freed_memory()
    workload, masks = load_workload(settings), masks_of_areas(settings.areas, settings.size)
    progress = _Progress(on_step, settings.repeats + 2)
    with torch.inference_mode():
        progress.advance()
        dense = DensePipelines(workload.pipe, workload.config, compiled=settings.compiled)
        search = dense.search(settings.repeats)
        benchmark = _EditBenchmark(workload, dense, search.best, dense.others(search))
        shortage = dense.shortage(DEFAULT_VARIANT) if settings.baseline else ""
        calls = benchmark.dense_calls(plain=settings.baseline and not shortage)
        rows: list[Row] = []
        for name, area, grid in masks:
            mask_calls, mask_rows = benchmark.mask_calls(f"{name} {area:.0%}", grid, default_only=name != "square")
            calls |= mask_calls
            rows += [{"mask": name, "asked_area": area} | row for row in mask_rows]
        samples = seconds_by_round(calls, settings.repeats, benchmark.warm_up, lambda: benchmark.begin_round(progress))
        samples |= plain_runs(samples, workload.config.num_timesteps)
        baselines = baseline_rows(search.best, benchmark.others, samples)
        fastest = fastest_call(baselines, "any")
        rows = [row | benchmark.edit_stats[row["call"]] | ratios(row, samples, fastest) for row in rows]
        layers = benchmark.profile(masks) if settings.profile else []
        metrics = dense_metrics(samples) | benchmark.dense_row
    return {
        "settings": settings_dict(workload, settings) | baseline_settings(baselines),
        "search": search.as_dict(),
        "dense": metrics | {"peak_memory_bytes": peak_memory(workload.device)},
        "baselines": baselines,
        "rows": rows,
        "turns": samples,
        "dense_summary": dense_summary(metrics, baselines),
        "summary": [_summary_row(row) for row in rows],
        "profile": layers,
        "notes": [
            *dense.notes,
            *([f"plain diffusers was not timed: {shortage}"] if shortage else []),
            *([RANDOM_NOTE] if workload.random else []),
        ],
    }


Row = dict[str, Any]
Samples = dict[str, list[float]]
"""Name of a call -> its seconds in every round."""

OVER_ANY = f"over the {TITLES['any']}"
"""The column of whole edits' second ratio."""

RANDOM_NOTE = "random weights: fidelity has no meaning; `python -m benchmarks.fidelity` has that of the same settings"


class _Progress:
    def __init__(self, on_step: OnStep | None, total: int) -> None:
        self._on_step, self._total, self._done = on_step, total, 0

    def advance(self) -> None:
        if self._on_step is not None:
            self._on_step(self._done, self._total, None)
        self._done += 1


class _EditBenchmark:
    """One engine, one recorded source, and the dense runs to compare with."""

    def __init__(
        self, workload: Workload, dense: DensePipelines, best: DenseVariant, others: dict[DenseVariant, str]
    ) -> None:
        self.pipe, self.config, self.dense, self.best = workload.pipe, workload.config, dense, best
        self.others = others
        self.editor = Editor(self.pipe)
        self.engine = Engine(self.pipe, encoding=choose_encoding("auto", workload.device))
        self.costs = self.engine.costs(self.config)
        self.text = self.engine.encode(self.config)
        sampler = self.engine.sampler(self.config)
        self.timestep = sampler.timesteps[len(sampler.timesteps) // 2]
        self.latents = torch.cat([sampler.latents] * self.engine.batch(self.config))
        self.maps = self._record()
        self.random_latents = torch.randn(self.latents[:1].shape, generator=torch.Generator().manual_seed(1)).to(
            self.latents
        )
        _, self.decoder = decode(self.pipe.vae, self.random_latents)
        self.warm_up: Calls = {}
        self.edit_stats: dict[str, Row] = {}
        self.dense_row: Row = {"step_macs": self.costs.dense_step()}

    def begin_round(self, progress: _Progress) -> None:
        """Forget the source of the round before."""
        progress.advance()
        self.editor = Editor(self.pipe)

    def dense_calls(self, *, plain: bool) -> Calls:
        """A step, a decode and the whole of the fastest exact run, the whole of others, and of our source.

        Args:
            plain: whether to time a step and a decode of plain diffusers.
        """
        calls: Calls = {}
        for name, variant in {"dense": self.best, **({"plain": DEFAULT_VARIANT} if plain else {})}.items():
            calls[f"{name} step"], calls[f"{name} decode"] = self.dense.step(variant), self.dense.decode(variant)
        for name, variant in whole_runs(self.best, self.others).items():
            calls[name], self.warm_up[name] = (partial(self.dense.run, variant, steps) for steps in (None, 1))
        self.dense_row["step_macs_counted_by_torch"] = _count_macs(
            lambda: self.pipe.unet(self.latents, self.timestep, return_dict=False, **self.text.unet_inputs)
        )
        return calls | {"recorded step": self._record, "source": self._generate}

    def mask_calls(self, name: str, grid: BoolGrid, *, default_only: bool) -> tuple[Calls, list[Row]]:
        """A step, a decode and whole edits over one mask.

        Args:
            name: The name of the mask.
            grid: booleans [h, w].
            default_only: whether edits are of the default quality alone.

        Returns:
            The calls, and a row for every quality.
        """
        step = self._sparse_step(grid)
        counted_macs = _count_macs(step)
        decode_call = partial(decode_sparse, self.pipe.vae, self.random_latents, grid, self.decoder)
        calls: Calls = {f"{name} step": step, f"{name} decode": decode_call}
        common = {
            "area": float(grid.mean()),
            "step_macs": self.costs.sparse_step(grid, STEP_DILATION),
            "step_macs_ratio": self.costs.dense_step() / self.costs.sparse_step(grid, STEP_DILATION),
            "step_macs_counted_by_torch": counted_macs,
            "step_call": f"{name} step",
            "decode_call": f"{name} decode",
        }
        rows = []
        for quality in (Quality.BALANCED,) if default_only else Quality:
            call = f"{name} edit: {quality}"
            calls[call] = partial(self._edit, call, grid, quality)
            if quality is not next(iter(Quality)):  # the first one warms up what all of them run
                self.warm_up[call] = _do_nothing
            rows.append(common | {"quality": str(quality), "call": call})
        return calls, rows

    def profile(self, masks: Sequence[tuple[str, float, BoolGrid]]) -> list[Row]:
        """The layers of one more source and of one more edit in every mask."""
        runs: Calls = {"source": self._generate}
        for name, area, grid in masks:
            runs[f"{name} {area:.0%}"] = partial(self._edit, "", grid, Quality.BALANCED)
        rows: list[Row] = []
        for name, run in runs.items():
            with profiled(self.pipe) as profile:
                run()
            rows += [{"run": name} | row for row in profile.rows()]
        return rows

    def _edit(self, call: str, grid: BoolGrid, quality: Quality) -> None:
        """A whole edit of the source, deleted from the history at once."""
        result = self.editor.edit(PROMPTS[1], mask=grid, quality=quality)
        self.editor.delete(result.id)
        stats = result.stats
        self.edit_stats[call] = {
            "whole_macs_ratio": stats.macs_dense / stats.macs,
            "growth": stats.growth,
            "fallback": stats.fallback,
            "overlay_bytes": stats.recorded_bytes,
        }

    def _generate(self) -> None:
        config = self.config
        source = self.editor.generate(
            config.prompt,
            seed=config.seed,
            guidance_scale=config.guidance_scale,
            width=config.width,
            height=config.height,
            num_inference_steps=config.num_inference_steps,
            scheduler=config.scheduler,
        )
        self.dense_row["recorded_bytes"] = source.stats.recorded_bytes

    def _record(self) -> Any:
        features = self.engine.executor.run_dense(self.latents, self.timestep, self.text, {})[1]
        features.encode(self.engine.encoding)
        return features

    def _sparse_step(self, grid: BoolGrid) -> Callable[[], object]:
        cache: dict[str, Tensor] = {}
        plan = self.engine.row_plan(grid, STEP_DILATION)
        return lambda: self.engine.executor.run_sparse(
            self.latents, self.timestep, self.text, cache, FeatureOverlay(self.maps, plan)
        )


def _do_nothing() -> None:
    """The warm-up of a call whose code another one has warmed up."""


def plain_runs(samples: Samples, steps: int) -> Samples:
    """{"plain": seconds of plain diffusers' whole run in every round}, its steps and its decode; {} if not timed.

    Args:
        samples: seconds of every call by round.
        steps: The number of steps of a whole run.
    """
    if "plain step" not in samples:
        return {}
    return {"plain": [steps * a + b for a, b in zip(samples["plain step"], samples["plain decode"], strict=True)]}


def ratios(row: Row, samples: Samples, fastest: str = "dense") -> Row:
    """Seconds of a row's step, decode and whole edit, those of the dense runs of the same rounds, and their ratios.

    Args:
        row: names its calls.
        samples: seconds of every call by round.
        fastest: The call that times the fastest dense run of any kind.
    """
    result: Row = {"whole_ratio_to_any": ratio(samples[fastest], samples[row["call"]]).as_dict()}
    for stage, call, dense in (
        ("step", row["step_call"], "dense step"),
        ("decode", row["decode_call"], "dense decode"),
        ("whole", row["call"], "dense"),
    ):
        result[f"{stage}_seconds"] = interval(samples[call]).as_dict()
        result[f"{stage}_ratio"] = ratio(samples[dense], samples[call]).as_dict()
        plain = dense.replace("dense", "plain")
        if plain in samples:
            result[f"{stage}_ratio_to_plain"] = ratio(samples[plain], samples[call]).as_dict()
    return result


def dense_metrics(samples: Samples) -> Row:
    """Seconds of the dense runs, and of the recorded step and source with their ratios to the fastest dense ones.

    Args:
        samples: seconds of every call by round.
    """
    names = {"dense step", "dense decode", "dense", "plain step", "plain decode", "plain", "recorded step", "source"}
    metrics: Row = {name.replace(" ", "_"): interval(samples[name]).as_dict() for name in samples if name in names}
    metrics["source_over_dense"] = ratio(samples["source"], samples["dense"]).as_dict()
    metrics["recorded_step_over_dense"] = ratio(samples["recorded step"], samples["dense step"]).as_dict()
    if "plain" in samples:
        metrics["plain_over_dense"] = ratio(samples["plain"], samples["dense"]).as_dict()
    return metrics


def _summary_row(row: Row) -> Row:
    """Speed-ups over the fastest exact run, and of whole edits over that of any kind, and plain diffusers if timed."""
    metrics = {
        "step": "step_ratio",
        "decode": "decode_ratio",
        "whole edit": "whole_ratio",
        OVER_ANY: "whole_ratio_to_any",
    }
    metrics |= (
        {"end-to-end speedup over stock diffusers": "whole_ratio_to_plain"} if "whole_ratio_to_plain" in row else {}
    )
    first = {"mask": row["mask"], "area": f"{row['area']:.1%}", "quality": row["quality"]}
    return (
        first
        | {"MACs": f"{row['step_macs_ratio']:.1f}x"}
        | {name: interval_text(row[key]) for name, key in metrics.items()}
    )


def _count_macs(step: Callable[[], object]) -> int:
    """Multiply-accumulates of a step as torch counts them; the first call makes what is kept."""
    step()
    with count_flops() as counter:
        step()
    return int(counter.get_total_flops() // 2)


def settings_dict(workload: Workload, settings: SpeedSettings) -> dict[str, Any]:
    """Return the settings of a measurement, ready for JSON.

    Args:
        workload: the model and its source.
        settings: The settings of the benchmark.
    """
    config = workload.config
    return {
        "model": workload.model_name(settings),
        "pixels": config.width,
        "num_inference_steps": config.num_inference_steps,
        "guidance_scale": config.guidance_scale,
        "scheduler": config.scheduler.value,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "step_growth": STEP_DILATION,
        "cache": "warm: the source is recorded, and memory that was freed is kept",
        "repeats": settings.repeats,
    }
