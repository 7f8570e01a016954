"""`python -m benchmarks.fidelity`: how close a sparse edit comes to the dense blended one, and its speed, by schedule.

Times are of the same edits, each in turns with the dense runs of this machine (`fisedit.bench.speed`) and with plain
diffusers. The reference of fidelity is diffusers' own pipeline on the new prompt with the same seed. Its latents
outside the mask are replaced by the source's after every step. PSNR is taken over the pixels inside the mask alone.
Masks are given. Schedules that ship run with shallow steps and without. OpenVINO and DeepCache have rows where they are
installed. Their PSNR is that of the blended edits that they make, their time that of a whole run.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle, islice, permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.schedules import QUALITIES, SCHEDULES, SHALLOW, SHIPPED, dilations, with_shallow_names
from fisedit.bench import metrics
from fisedit.bench.dense_pipelines import DensePipelines
from fisedit.bench.dense_search import (
    DEFAULT_VARIANT,
    TORCH,
    baseline_rows,
    baseline_settings,
    fastest_call,
    run_title,
    whole_runs,
)
from fisedit.bench.edit_case import BenchmarkEdit, EditCase, get_trajectory
from fisedit.bench.speed import OVER_ANY
from fisedit.bench.timing import interval, interval_text, measure_seconds, ratio
from fisedit.costs.schedules import DILATION_PAIRS
from fisedit.editor import Editor
from fisedit.machine.device import choose_device
from fisedit.masking.region import Region
from fisedit.models.loader import load
from fisedit.values import LATENT_FACTOR, GenerationConfig, OnStep, Quality, SchedulerName, shallow_steps

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from benchmarks.settings import FidelitySettings
    from fisedit.bench.dense_search import DenseVariant
    from fisedit.edits.pipeline import EditPipeline
    from fisedit.history import EditResult
    from fisedit.values import BoolGrid, Dilation

OBJECTS = "cat dog fox panda frog lion cake pumpkin car castle".split()
BACKGROUND_PHRASES = ("on a beach", "in the snow", "on the grass", "at sunset")
AREA = 0.19
"""Share of the picture that the given square masks cover."""


def measure_fidelity(settings: FidelitySettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Edit pictures with every dilation schedule; compare each with the dense blended edit and the fastest dense run.

    Args:
        settings: model, sampling and number of word swaps; the prompts name what the demo model can draw.
        on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "search", "rows", "summary", "shipped", "turns", "values", "notes"}.
        Given per schedule are the median, tenth percentile and worst PSNR in dB. Also given are the share of dense
        multiply-accumulates, and how many times faster than dense a whole edit is. The "values" list the default's PSNR
        of every edit.
    """
    device = choose_device(settings.device)
    pipe = load(settings.model, device=device, dtype=settings.dtype, local_files_only=settings.local_files_only)
    edits = [(new, source_config(settings, i, pipe, old)) for i, (old, new) in enumerate(swaps(settings.edits))]
    with torch.inference_mode():
        dense = DensePipelines(pipe, edits[0][1], compiled=settings.compiled)
        search = dense.search()
        others = dense.others(search)
    editor = Editor(pipe)
    schedules = _schedules(_pipeline(editor), edits[0][1])
    samples = _Samples(dense, whole_runs(search.best, others), schedules)
    samples.warm_up(editor, *edits[0])
    for i, (changed, config) in enumerate(edits):
        if on_step is not None:
            on_step(i, settings.edits, None)
        samples.add(editor, changed, config)
    baselines = baseline_rows(search.best, others, samples.seconds)
    fastest = fastest_call(baselines, "any")
    rows = [_row(name, samples, fastest) for name in samples.psnr]
    dtype = str(pipe.unet.dtype).removeprefix("torch.")
    return {
        "settings": _settings_dict(settings, dtype) | baseline_settings(baselines),
        "search": search.as_dict(),
        "baselines": baselines,
        "rows": rows,
        "summary": [_summary_row(row) for row in rows],
        "shipped": [_shipped_row(row) for row in rows if row["growth"].removesuffix(SHALLOW) in QUALITIES],
        "turns": samples.seconds,
        "values": samples.psnr["default"],
        "notes": [*(f"{run_title(row)}{_outcome(row)}" for row in baselines), *dense.notes],
    }


def _outcome(baseline: dict[str, Any]) -> str:
    return f": {baseline['reason'] or interval_text(baseline['whole_seconds'], ' s')}"


def _pipeline(editor: Editor) -> EditPipeline:
    return editor._pipeline  # noqa: SLF001 (edits ask for no shallow steps)


def _schedules(pipeline: EditPipeline, config: GenerationConfig) -> dict[str, tuple[Dilation, ...] | None]:
    """Name -> the dilations of an edit; None for the planner's choice. Short runs have no shallow steps."""
    steps, shallow = config.num_inference_steps, pipeline.planner.shallow_steps(config)
    found: dict[str, tuple[Dilation, ...] | None] = {}
    for name in with_shallow_names(SCHEDULES) if shallow else SCHEDULES:
        growth = SCHEDULES[name.removesuffix(SHALLOW)](steps)
        found[name] = None if growth is None else dilations(growth, shallow if name.endswith(SHALLOW) else ())
    return found


class _Samples:
    """The measurements of every edit, by schedule, in turns with dense runs."""

    def __init__(
        self,
        dense: DensePipelines,
        runs: dict[str, DenseVariant],
        schedules: dict[str, tuple[Dilation, ...] | None],
    ) -> None:
        self._dense, self._runs, self.schedules = dense, runs | {"plain": DEFAULT_VARIANT}, schedules
        self._calls = {variant.name: call for call, variant in runs.items() if variant.runtime != TORCH}
        names = [*schedules, *self._calls]
        self.psnr: dict[str, list[float]] = {name: [] for name in names}
        self.share: dict[str, list[float]] = {name: [] for name in names}
        self.seconds: dict[str, list[float]] = {name: [] for name in (*self._runs, "source", *schedules)}

    def add(self, editor: Editor, changed: str, config: GenerationConfig) -> None:
        """Measure one edit by every schedule.

        Args:
            editor: The editor that edits.
            changed: the new prompt.
            config: The settings of the source.
        """
        for name, variant in self._runs.items():
            self.seconds[name].append(measure_seconds(partial(self._dense.run, variant)))
        self.seconds["source"].append(measure_seconds(lambda: _generate(editor, config)))
        source, grid = editor.current, attended_square(editor, changed)
        case = EditCase(editor, BenchmarkEdit("swap", config.prompt, changed), source, get_trajectory(editor, source))
        reference, inside = case.blended(grid), metrics.cells_to_pixels(grid)
        for name, schedule in self.schedules.items():
            editor.checkout(source.id)
            self.seconds[name].append(measure_seconds(partial(_edit, editor, changed, grid, schedule)))
            result = editor.current
            self.psnr[name].append(metrics.psnr(result.image, reference, inside))
            self.share[name].append(result.stats.macs / result.stats.macs_dense)
        for name, call in self._calls.items():
            blended = case.blended_by(self._dense.get(self._runs[call]), grid)
            self.psnr[name].append(metrics.psnr(blended, reference, inside))
            self.seconds[name] = self.seconds[call]

    def warm_up(self, editor: Editor, changed: str, config: GenerationConfig) -> None:
        """Run everything once that is timed: kernels are made, and memory is the process's; arguments as in `add`."""
        for variant in self._runs.values():
            self._dense.run(variant)
        source = _generate(editor, config)
        for name in with_shallow_names(SHIPPED):
            if name in self.schedules:
                editor.checkout(source.id)
                _edit(editor, changed, attended_square(editor, changed), self.schedules[name])


def _edit(editor: Editor, changed: str, grid: BoolGrid, schedule: tuple[Dilation, ...] | None) -> None:
    """Edit a square by a schedule, whatever it costs; by None as an edit of the default quality runs."""
    pipeline = _pipeline(editor)
    request = pipeline.requests.edit(changed, Region.mask(grid), growth=Quality.BALANCED)
    plan = pipeline.plan(request)
    pipeline.run(request, plan if schedule is None else plan.with_dilation(schedule))


def _generate(editor: Editor, config: GenerationConfig) -> EditResult:
    return editor.generate(
        config.prompt,
        seed=config.seed,
        num_inference_steps=config.num_inference_steps,
        guidance_scale=config.guidance_scale,
        width=config.width,
        height=config.height,
    )


def source_config(settings: FidelitySettings, i: int, pipe: StableDiffusionPipeline, prompt: str) -> GenerationConfig:
    """The i-th source's config, at the model's own size.

    Args:
        settings: The settings of the evaluation.
        i: index of the edit.
        pipe: the model.
        prompt: The prompt of the source.
    """
    side, steps = int(pipe.unet.config.sample_size) * LATENT_FACTOR, settings.num_inference_steps
    return GenerationConfig(
        prompt, 1000 + settings.seed + i, "", steps, settings.guidance_scale, side, side, SchedulerName.DDIM
    )


def _settings_dict(settings: FidelitySettings, dtype: str) -> dict[str, Any]:
    return {
        "model": settings.model,
        "edits": settings.edits,
        "num_inference_steps": settings.num_inference_steps,
        "mask_area": AREA,
        "default_growths": DILATION_PAIRS,
        "dtype": dtype,
        "guidance_scale": settings.guidance_scale,
        "scheduler": "ddim",
    }


def swaps(count: int) -> list[tuple[str, str]]:
    """Prompt pairs that differ in one object: "a cat and a cake on a beach" -> "a dog and a cake on a beach"."""
    triples = permutations(OBJECTS, 3)
    step = len(OBJECTS) * (len(OBJECTS) - 1) * (len(OBJECTS) - 2) // count
    chosen = zip(islice(triples, 0, None, max(1, step)), cycle(BACKGROUND_PHRASES), strict=False)
    pairs = [
        (f"a {old} and a {other} {background}", f"a {new} and a {other} {background}")
        for (old, other, new), background in chosen
    ]
    return pairs[:count]


def attended_square(editor: Editor, changed: str) -> BoolGrid:
    """A square mask of `AREA` where the changed words attend most.

    Args:
        editor: its current result is the source.
        changed: the new prompt.

    Returns:
        Booleans [h, w].
    """
    heatmap = editor.attention(changed)
    height, width = heatmap.shape
    edge = max(1, round((AREA * height * width) ** 0.5))
    sums = np.lib.stride_tricks.sliding_window_view(heatmap, (edge, edge)).sum((2, 3))
    top, left = np.unravel_index(sums.argmax(), sums.shape)
    grid = np.zeros(heatmap.shape, bool)
    grid[top : top + edge, left : left + edge] = True
    return grid


def _row(name: str, samples: _Samples, fastest: str) -> dict[str, Any]:
    psnr, share, seconds = samples.psnr[name], samples.share[name], samples.seconds
    return {
        "growth": name,
        "shallow_steps": len(shallow_steps(samples.schedules.get(name) or ())),
        "psnr_median": float(np.median(psnr)),
        "psnr_p10": float(np.percentile(psnr, 10)),
        "psnr_min": float(np.min(psnr)),
        "macs_ratio": len(share) / sum(share) if share else None,
        "whole_seconds": interval(seconds[name]).as_dict(),
        "dense_seconds": interval(seconds["dense"]).as_dict(),
        "whole_ratio": ratio(seconds["dense"], seconds[name]).as_dict(),
        "whole_ratio_to_any": ratio(seconds[fastest], seconds[name]).as_dict(),
        "whole_ratio_to_plain": ratio(seconds["plain"], seconds[name]).as_dict(),
    }


def _shipped_row(row: dict[str, Any]) -> dict[str, Any]:
    quality = QUALITIES[row["growth"].removesuffix(SHALLOW)]
    return {"quality": str(quality), "shallow steps": row["shallow_steps"]} | _summary_row(row)


def _summary_row(row: dict[str, Any]) -> dict[str, Any]:
    decibels = {"median dB": "psnr_median", "10th percentile": "psnr_p10", "worst": "psnr_min"}
    return {
        "growth": row["growth"],
        **{name: f"{row[key]:.1f}" for name, key in decibels.items()},
        "MACs": f"{row['macs_ratio']:.1f}x" if row["macs_ratio"] else "",
        "whole edit": interval_text(row["whole_ratio"]),
        OVER_ANY: interval_text(row["whole_ratio_to_any"]),
        "end-to-end speedup over stock diffusers": interval_text(row["whole_ratio_to_plain"]),
    }


if __name__ == "__main__":
    from benchmarks.commands import run

    run("fidelity")
