"""`python -m benchmarks.records`: bytes, seconds and fidelity of recorded features by the dtype they are kept in.

Bytes and seconds are of SD 1.5's architecture; every step is timed in turns with that over features in the model's own
dtype. Fidelity is that of `benchmarks.fidelity`, on its edits by the shipped schedules, over one record encoded in
every way. All of its maps are encoded, though the default leaves small ones as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fidelity import attended_square, source_config, swaps
from benchmarks.schedules import SHIPPED
from fisedit.bench import metrics
from fisedit.bench.edit_case import BenchmarkEdit, EditCase, get_trajectory
from fisedit.bench.timing import interval_text, ratio, seconds_by_round
from fisedit.bench.workload import STEP_DILATION, load_workload, square_mask
from fisedit.editor import Editor
from fisedit.features.cache import FeatureOverlay, StepFeatures
from fisedit.features.codec import AS_RECORDED, CACHE_DTYPES
from fisedit.machine.device import choose_device
from fisedit.machine.malloc import keep_freed_memory
from fisedit.models.families.conditioning import Conditioning
from fisedit.models.loader import load
from fisedit.sampling.engine import Engine
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from benchmarks.settings import FidelitySettings
    from fisedit.bench.settings import SpeedSettings
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import OnStep

Row = dict[str, Any]

Given = tuple[Tensor, Tensor, Conditioning]
"""Latents, timestep and conditions of an evaluation."""

AREA = 0.05
"""Share of the picture that the timed step's mask covers."""


def measure_record_encodings(
    speed: SpeedSettings, fidelity: FidelitySettings, on_step: OnStep | None = None
) -> dict[str, Any]:
    """Measure every dtype of recorded features.

    Args:
        speed: model, size and rounds of the timed steps.
        fidelity: model and edits of the fidelity.
        on_step: called before the timing and before every edit with (i, n, None).

    Returns:
        {"settings", "rows", "summary", "turns", "values", "notes"}, ready for JSON; "values" has every edit's PSNR.

    Raises:
        InputError: the device is not on this machine. ModelError: a model cannot be loaded.
    """
    progress = on_step or (lambda *_: None)
    progress(0, fidelity.edits + 1, None)
    bytes_of_step, turns, dtype = _speed(speed)
    values = _fidelity(fidelity, lambda i: progress(i + 1, fidelity.edits + 1, None))
    rows = [_row(name, bytes_of_step[name], turns, values) for name in CACHE_DTYPES]
    return {
        "settings": {
            "size": speed.size,
            "dtype": dtype,
            "repeats": speed.repeats,
            "area": AREA,
            "growth": STEP_DILATION,
            "edits": fidelity.edits,
            "num_inference_steps": fidelity.num_inference_steps,
            "guidance_scale": fidelity.guidance_scale,
        },
        "rows": rows,
        "summary": [_summary_row(row) for row in rows],
        "turns": turns,
        "values": {f"{name}, {schedule}": psnr for (name, schedule), psnr in values.items()},
        "notes": ["bytes and seconds: random weights of the architecture; dB: the demo model"],
    }


def _speed(settings: SpeedSettings) -> tuple[dict[str, int], dict[str, list[float]], str]:
    """Return the bytes of a step by dtype; the seconds of every call by round; the model's dtype."""
    keep_freed_memory()
    workload = load_workload(settings)
    engine, config = Engine(workload.pipe), workload.config
    with torch.inference_mode():
        sampler = engine.sampler(config)
        latents, middle = torch.cat([sampler.latents] * engine.batch(config)), len(sampler.timesteps) // 2
        given = latents, sampler.timesteps[middle], engine.encode(config)
        plan = engine.row_plan(square_mask(AREA, settings.size // LATENT_FACTOR), STEP_DILATION)
        _, recorded = engine.executor.run_dense(*given, {})
        calls: dict[str, Callable[[], object]] = {}
        sizes, cache = {}, dict[str, Tensor]()
        for name in CACHE_DTYPES:
            features = encoded(recorded, name)
            sizes[name] = features.own_bytes
            calls[f"{name} step"] = partial(_sparse_step, engine, given, cache, features, plan)
            calls[f"{name} source step"] = partial(_source_step, engine, given, name)
        turns = seconds_by_round(calls, settings.repeats)
    return sizes, turns, str(workload.dtype).removeprefix("torch.")


def _sparse_step(engine: Engine, given: Given, cache: Any, features: StepFeatures, plan: SparsePlan) -> None:
    engine.executor.run_sparse(*given, cache, FeatureOverlay(features, plan))


def _source_step(engine: Engine, given: Given, name: str) -> None:
    _, features = engine.executor.run_dense(*given, {})
    features.encode(CACHE_DTYPES[name])


def encoded(features: StepFeatures, name: str) -> StepFeatures:
    """A copy of a step's features, kept in a dtype of `CACHE_DTYPES`."""
    found = StepFeatures(dict(features.maps), features.statistics, features.joined)
    found.encode(CACHE_DTYPES[name])
    return found


def _fidelity(settings: FidelitySettings, on_edit: Callable[[int], None]) -> dict[tuple[str, str], list[float]]:
    """(dtype, schedule) -> PSNR of every edit."""
    device, offline = choose_device(settings.device), settings.local_files_only
    pipe = load(settings.model, device=device, dtype=settings.dtype, local_files_only=offline)
    editor, values = Editor(pipe, cache_dtype="model"), dict[tuple[str, str], list[float]]()
    for i, (old, new) in enumerate(swaps(settings.edits)):
        on_edit(i)
        config = source_config(settings, i, pipe, old)
        source = editor.generate(
            old,
            seed=config.seed,
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale,
            width=config.width,
            height=config.height,
        )
        trajectory, grid = get_trajectory(editor, source), attended_square(editor, new)
        case = EditCase(editor, BenchmarkEdit("swap", old, new), source, trajectory)
        reference, inside, recorded = case.blended(grid), metrics.cells_to_pixels(grid), list(trajectory.features)
        for name in CACHE_DTYPES:
            trajectory.features[:] = [
                encoded(step, name) if isinstance(step, StepFeatures) else step for step in recorded
            ]
            for schedule, growth in SHIPPED.items():
                editor.checkout(source.id)
                result = editor.edit(new, mask=grid, growth=growth(config.num_inference_steps))
                values.setdefault((name, schedule), []).append(metrics.psnr(result.image, reference, inside))
        editor.forget()
    return values


def _row(name: str, step_bytes: int, turns: dict[str, list[float]], values: dict[tuple[str, str], list[float]]) -> Row:
    own = next(key for key, encoding in CACHE_DTYPES.items() if encoding == AS_RECORDED)
    row: Row = {"cache_dtype": name, "step_bytes": step_bytes}
    for call in ("step", "source step"):
        row[call.replace(" ", "_")] = ratio(turns[f"{name} {call}"], turns[f"{own} {call}"]).as_dict()
    for schedule in SHIPPED:
        psnr, as_recorded = values[name, schedule], values[own, schedule]
        row[schedule] = {
            "median": float(np.median(psnr)),
            "p10": float(np.percentile(psnr, 10)),
            "median_less": float(np.median(as_recorded) - np.median(psnr)),
            "p10_less": float(np.percentile(as_recorded, 10) - np.percentile(psnr, 10)),
        }
    return row


def _summary_row(row: Row) -> Row:
    fidelity = {
        f"dB: {schedule}": f"{row[schedule]['median']:.1f} ({row[schedule]['p10']:.1f})" for schedule in SHIPPED
    }
    return {
        "kept in": row["cache_dtype"],
        "MB a step": f"{row['step_bytes'] / 1e6:.0f}",
        "sparse step": interval_text(row["step"]),
        "source's step": interval_text(row["source_step"]),
    } | fidelity


if __name__ == "__main__":
    from benchmarks.commands import run

    run("records")
