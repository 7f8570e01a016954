"""`fisedit bench edit`: what an edit costs beside dense diffusers, measured in one process, interleaved, in medians.

The dense baseline is diffusers' own pipeline in the device's best precision, channels-last, with freed memory kept.
Plain diffusers (float32, as it comes) is measured beside it. Masks are given, so mask prediction is not measured.
On a GPU that was asked for, `cuda_speed` measures captured graphs instead: another engine path, other baselines, and a
report of its own; both share `workload`.
"""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fisedit import __version__
from fisedit.editor import Editor
from fisedit.evaluation.timing import measure_seconds, median_seconds
from fisedit.evaluation.workload import PROMPTS, STEP_DILATION, load_workload, masks_of_areas
from fisedit.models.malloc import keep_freed_memory
from fisedit.sampling.denoise import Engine
from fisedit.sparse.feature_cache import FeatureOverlay
from fisedit.sparse.vae_decode import decode, decode_sparse
from fisedit.values import OnStep

if TYPE_CHECKING:
    from fisedit.evaluation.settings import SpeedSettings
    from fisedit.evaluation.workload import Workload
    from fisedit.values import BoolGrid

ROUNDS = 3
"""How often whole runs take turns, at most: dense ones, recorded sources and edits."""

Row = dict[str, Any]


def measure_edit_speed(settings: SpeedSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Time steps, decodes and whole edits over squares and ragged masks.

    Args:
        settings: of the benchmark.
        on_step: called before every measurement with (i, n, None).

    Returns:
        {"settings", "dense", "rows", "summary"}, ready for JSON; times in seconds, ratios over the dense run.

    Raises:
        InputError: the device is not on this machine.
        ModelError: the model cannot be loaded.
    """
    keep_freed_memory()
    workload, masks = load_workload(settings), masks_of_areas(settings.areas, settings.size)
    with torch.inference_mode():
        total = len(masks) + 2 + min(settings.repeats, ROUNDS)
        benchmark = _EditBenchmark(workload, settings.repeats, _Progress(on_step, total))
        dense = benchmark.measure_dense(plain=settings.baseline)
        rows = []
        for i, (name, area, grid) in enumerate(masks):
            rows.append(benchmark.measure_mask(name, area, grid))
            if (i + 1) % len(settings.areas) == 0:
                benchmark.run_dense(dense)
        benchmark.repeat_edits(dense, rows, [grid for _, _, grid in masks])
        benchmark.add_ratios(dense, rows)
    report = settings_dict(workload, settings)
    return {"settings": report, "dense": dense, "rows": rows, "summary": [_summary_row(row) for row in rows]}


@dataclass
class _Progress:
    on_step: OnStep | None
    total: int
    done: int = 0

    def advance(self) -> None:
        if self.on_step is not None:
            self.on_step(self.done, self.total, None)
        self.done += 1


class _EditBenchmark:
    """One engine, one recorded source, and the dense runs to compare with."""

    def __init__(self, workload: Workload, repeats: int, progress: _Progress) -> None:
        self.pipe, self.config, self.progress = workload.pipe, workload.config, progress
        self.repeats, self.rounds = repeats, min(repeats, ROUNDS)
        self.editor, self.engine = Editor(self.pipe), Engine(self.pipe)
        self.costs = self.engine.costs(self.config)
        self.text = self.engine.encode(self.config)
        sampler = self.engine.sampler(self.config)
        self.timestep = sampler.timesteps[len(sampler.timesteps) // 2]
        self.latents = torch.cat([sampler.latents] * self.engine.batch(self.config))

    def measure_dense(self, *, plain: bool) -> Row:
        """Dense runs, the recorded source, and the overhead of recording."""
        self.progress.advance()
        step = self._dense_step()
        step()
        macs = self.costs.dense_step()
        with _count_flops() as counter:
            step()
        counted = counter.get_total_flops() // 2
        times = median_seconds({"dense": step, "recorded": lambda: self._record(self.latents)}, self.repeats)
        row: Row = {"step_seconds": times["dense"], "step_macs": macs, "step_macs_counted_by_torch": counted}
        row["recording_overhead"] = times["recorded"] / times["dense"] - 1
        self.progress.advance()
        row |= {"whole_seconds": [], "recorded_whole_seconds": []}
        for _ in range(self.rounds):
            self.run_dense(row)
            self.editor = Editor(self.pipe)
            row["recorded_whole_seconds"].append(measure_seconds(lambda: self.editor.generate(**self._arguments())))
        row["recording_whole_overhead"] = median(row["recorded_whole_seconds"]) / median(row["whole_seconds"]) - 1
        row["recorded_bytes"] = self.editor.current.stats.recorded_bytes
        self.maps = self._record(self.latents)
        self.picture, self.decoder = decode(self.pipe.vae, self._random_latents())
        self.progress.advance()
        return row | (self._plain() if plain else {})

    def measure_mask(self, name: str, area: float, grid: BoolGrid) -> Row:
        """Step, decode and whole edit of one mask [h, w], each interleaved with its dense counterpart."""
        self.progress.advance()
        plan = self.engine.plan(grid, STEP_DILATION)
        sparse = self._sparse_step(plan)
        sparse()
        with _count_flops() as counter:
            sparse()
        step = median_seconds({"dense": self._dense_step(), "sparse": sparse}, self.repeats)
        vae, latents = self.pipe.vae, self._random_latents()
        decodes = {
            "dense": lambda: vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0],
            "sparse": lambda: decode_sparse(vae, latents, grid, self.decoder, self.picture),
        }
        decoded = median_seconds(decodes, self.repeats)
        whole = self._measure_edit(grid)
        stats = self.editor.current.stats
        return whole | {
            "mask": name,
            "area": float(grid.mean()),
            "asked_area": area,
            "step_macs": self.costs.sparse_step(grid, STEP_DILATION),
            "step_macs_ratio": self.costs.dense_step() / self.costs.sparse_step(grid, STEP_DILATION),
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

    def _measure_edit(self, grid: BoolGrid) -> Row:
        """A whole edit; one that falls back takes turns with dense runs, as it is as long as they are."""
        first = self._edit(grid)
        if not self.editor.current.stats.fallback:
            return {"whole_runs": [first]}
        pairs = [(measure_seconds(self._generate), self._edit(grid)) for _ in range(self.rounds)]
        return {
            "whole_fresh_seconds": first,  # in memory that was not used before
            "whole_runs": [ours for _, ours in pairs],
            "whole_dense_seconds": median(dense for dense, _ in pairs),
            "whole_pairs_seconds": pairs,  # dense, ours
        }

    def run_dense(self, dense: Row) -> None:
        """Run diffusers' dense pipeline once more, between the edits."""
        dense["whole_seconds"].append(measure_seconds(self._generate))

    def repeat_edits(self, dense: Row, rows: list[Row], grids: list[BoolGrid]) -> None:
        """More rounds of every sparse edit, with a dense run before each round."""
        for _ in range(self.rounds - 1):
            self.progress.advance()
            self.run_dense(dense)
            for row, grid in zip(rows, grids, strict=True):
                if not row["fallback"]:
                    row["whole_runs"].append(self._edit(grid))

    def add_ratios(self, dense: Row, rows: list[Row]) -> None:
        """Add the ratios of whole edits: over the dense median, or over the dense runs beside one that ran dense."""
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
        seconds = min(measure_seconds(lambda: unet(latents, self.timestep, text)) for _ in range(2))
        return {"plain_step_seconds": seconds}

    def _arguments(self) -> dict[str, Any]:
        r = self.config
        sizes = {"width": r.width, "height": r.height, "num_inference_steps": r.num_inference_steps}
        return {"prompt": r.prompt, "seed": r.seed, "guidance_scale": r.guidance_scale, **sizes}

    def _edit(self, grid: BoolGrid) -> float:
        """Seconds of a whole edit of the source, in the memory that the one before it had."""
        for earlier in self.editor.history[1:]:
            self.editor.delete(earlier.id)
        self.editor.checkout("0")
        return measure_seconds(lambda: self.editor.edit(PROMPTS[1], mask=grid))

    def _generate(self) -> None:
        arguments = self._arguments()
        self.pipe(generator=torch.Generator().manual_seed(arguments.pop("seed")), **arguments)

    def _random_latents(self) -> Tensor:
        return torch.randn(self.latents[:1].shape, generator=torch.Generator().manual_seed(1)).to(self.latents)

    def _dense_step(self) -> Callable[[], object]:
        return lambda: self.pipe.unet(self.latents, self.timestep, self.text, return_dict=False)

    def _record(self, latents: Tensor) -> Any:
        return self.engine.executor.run_dense(latents, self.timestep, self.text, {})[1]

    def _sparse_step(self, plan: Any) -> Callable[[], object]:
        cache: dict[str, Tensor] = {}
        return lambda: self.engine.executor.run_sparse(
            self.latents, self.timestep, self.text, cache, FeatureOverlay(self.maps, plan)
        )


def _summary_row(row: Row) -> Row:
    """Speed-ups over the dense run, and of a step over plain diffusers if that was timed."""
    shown = {"MACs": "step_macs_ratio", "step": "step_ratio", "whole edit": "whole_ratio", "decode": "decode_ratio"}
    shown |= {"step, to plain": "step_ratio_to_plain"} if "step_ratio_to_plain" in row else {}
    return {"mask": row["mask"], "area": f"{row['area']:.1%}"} | {k: f"{row[v]:.1f}x" for k, v in shown.items()}


@contextmanager
def _count_flops() -> Iterator[Any]:
    """Torch's own counter, with formulas for kernels that it has none for."""
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


def settings_dict(workload: Workload, settings: SpeedSettings) -> dict[str, Any]:
    """What is measured, on which device, by which versions, ready for JSON.

    Args:
        workload: the model and its source.
        settings: of the benchmark.
    """
    config, device, dtype = workload.config, workload.device, str(workload.dtype).removeprefix("torch.")
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "model": settings.model or "SD 1.5 architecture, random weights",
        "pixels": config.width,
        "num_inference_steps": config.num_inference_steps,
        "guidance_scale": config.guidance_scale,
        "scheduler": config.scheduler.value,
        "dtype": dtype,
        "dense_baseline": f"diffusers, {dtype}, channels_last",
        "plain_baseline": "diffusers, float32, contiguous",
        "step_growth": STEP_DILATION,
        "cache": "warm: the source is recorded, and memory that was freed is kept",
        "repeats": settings.repeats,
        "device": f"{chip}, {torch.get_num_threads()} threads",
        "versions": {"fisedit": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
