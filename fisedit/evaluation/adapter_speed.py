"""`fisedit bench adapters`: what a reference adapter (arXiv 2410.22901) adds to a sparse step, interleaved, in medians.

Weights are random: of Stable Diffusion 1.5's architecture unless a model is named, and of every family's adapter. The
same step is run without an adapter, with one over a source that was made with it, and with one over a source that was
not, at the growth of `fisedit.evaluation.speed`. Shares are of the step without, in the median
over turns: so a machine that changes its pace does little harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fisedit.adapters.base import AdapterStack
from fisedit.adapters.checkpoints import fresh_adapter
from fisedit.adapters.cost import dense_macs, sparse_macs
from fisedit.adapters.insertion_points import tap_maps
from fisedit.adapters.references import ReferenceCondition, match_unet
from fisedit.evaluation.speed import GUIDANCE, MASKS, PROMPTS, STEP_GROWTH, Row, pipeline, settings, turns
from fisedit.models.device import choose_device, choose_dtype
from fisedit.models.malloc import keep_freed_memory
from fisedit.sampling.denoise import Engine
from fisedit.sparse.cost_model import unet_macs
from fisedit.values import LATENT_FACTOR, GenerationConfig, OnStep, SchedulerName

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    from fisedit.adapters.row_column import RowColumnAdapter
    from fisedit.sparse.feature_cache import StepFeatures
    from fisedit.sparse_kernels.row_plan import SparsePlan

FAMILIES = ("v1", "v3", "v5", "v5b")
"""Those that differ in cost: v2 is v3 less its coarsest block."""


def run(
    *,
    model: str | None = None,
    families: Sequence[str] = FAMILIES,
    areas: Sequence[float] = (0.05,),
    size: int = 512,
    device: str | None = None,
    dtype: str | None = None,
    local_files_only: bool = False,
    repeats: int = 5,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Measure steps with and without adapters over squares and ragged masks.

    Args:
        model: as in `fisedit.models.loader.load`; None for SD 1.5's architecture with random weights.
        areas: shares of the picture, 0 to 1. size: pixels, square. repeats: of every step.
        local_files_only: never reach for the network. on_step: called before every measurement with (i, n, None).

    Returns:
        {"settings", "dense", "rows", "summary"}, ready for JSON; times in seconds, shares of the step without.

    Raises:
        AdapterError: no such family.
    """
    keep_freed_memory()
    where = choose_device(device)
    precision = choose_dtype(dtype, where)
    pipe = pipeline(model, where, precision, local_files_only=local_files_only)
    config = GenerationConfig(PROMPTS[0], 7, "", 20, GUIDANCE, size, size, SchedulerName.DDIM)
    rows: list[Row] = []
    with torch.inference_mode():
        bench = _Bench(pipe, config, repeats)
        for i, family in enumerate(families):
            condition = bench.condition(random_adapter(pipe.unet, family))
            conditioned = bench.record([condition])
            for j, (name, area) in enumerate((name, area) for name in MASKS for area in areas):
                if on_step is not None:
                    on_step(i * len(MASKS) * len(areas) + j, len(families) * len(MASKS) * len(areas), None)
                rows.append({"family": family, "mask": name} | bench.row(condition, conditioned, name, area))
    described = settings(model, config, where, precision, repeats)
    return {"settings": described, "dense": bench.dense, "rows": rows, "summary": [_summary(row) for row in rows]}


@torch.inference_mode(mode=False)
@torch.no_grad()
def random_adapter(unet: UNet2DConditionModel, family: str) -> RowColumnAdapter:
    """An adapter for a UNet whose gains are of order one, laid out as in an editor."""
    adapter = match_unet(fresh_adapter(unet, family), unet)
    generator = torch.Generator(unet.device).manual_seed(0)
    for name, weights in adapter.named_parameters():
        if weights.ndim > 1:
            weights.normal_(0, weights[0].numel() ** -0.5, generator=generator)
        else:
            weights.fill_(name.endswith("weight"))
    return adapter.eval().requires_grad_(False)


class _Bench:
    """One engine and one source, recorded without an adapter; `dense` is a dense step's MACs and what families add."""

    def __init__(self, pipe: StableDiffusionPipeline, config: GenerationConfig, repeats: int) -> None:
        self.engine, self.config, self.repeats = Engine(pipe), config, repeats
        self.text = self.engine.encode(config)
        sampler = self.engine.sampler(config)
        self.timestep = sampler.timesteps[len(sampler.timesteps) // 2]
        self.latents = torch.cat([sampler.latents] * self.engine.batch(config))
        self.plain = self.record([])
        self.dense: Row = {"macs": self._macs(self.engine.sizes(config))}

    def condition(self, adapter: RowColumnAdapter) -> ReferenceCondition:
        """An adapter that has read a reference: noise, as good as any."""
        unet, name = self.engine.pipe.unet, adapter.family.name
        self.dense[name] = len(self.latents) * dense_macs(adapter, unet, self.engine.grids(self.config))
        seen = tap_maps(unet, self.latents, self.text, tuple(adapter.channels))
        return ReferenceCondition(adapter, adapter.read(seen), 1.0, name)

    def record(self, conditions: list[ReferenceCondition]) -> StepFeatures:
        """A source's step, made with adapters."""
        return self.engine.executor.run_dense(
            self.latents, self.timestep, self.text, {}, extra=AdapterStack(conditions)
        )[1]

    def row(self, condition: ReferenceCondition, conditioned: StepFeatures, mask: str, area: float) -> Row:
        """One mask: three steps that take turns."""
        grid = MASKS[mask](area, self.config.width // LATENT_FACTOR)
        plan = self.engine.plan(grid, STEP_GROWTH)
        times = turns(
            {
                "without": self._step(plan, self.plain, []),
                "with": self._step(plan, conditioned, [condition]),
                "with_over_plain": self._step(plan, self.plain, [condition]),
            },
            self.repeats,
        )
        batch, unet = len(self.latents), self.engine.pipe.unet
        macs = {"without": self._macs(plan.rows)}
        for name, recorded in (("with", True), ("with_over_plain", False)):
            macs[name] = macs["without"] + batch * sparse_macs(condition.adapter, unet, plan, recorded=recorded)
        row: Row = {"area": float(grid.mean()), "asked_area": area, "macs": macs, "turns": times}
        row["seconds"] = {name: median(seconds) for name, seconds in times.items()}
        for name in ("with", "with_over_plain"):
            pairs = [a / b - 1 for a, b in zip(times[name], times["without"], strict=True)]
            row[f"{name}_share"] = {"macs": macs[name] / macs["without"] - 1, "seconds": median(pairs)}
        return row

    def _macs(self, rows: Sequence[int]) -> int:
        """Of the UNet's step that computes so many rows."""
        sizes = self.engine.sizes(self.config)
        return unet_macs(self.engine.executor.sites, rows, sizes, len(self.latents), self.text.shape[1])

    def _step(
        self, plan: SparsePlan, source: StepFeatures, conditions: list[ReferenceCondition]
    ) -> Callable[[], object]:
        text: dict[str, Tensor] = {}
        inputs = self.latents, self.timestep, self.text, text, source, plan
        return lambda: self.engine.executor.run_sparse(*inputs, extra=AdapterStack(conditions))


def _summary(row: Row) -> Row:
    """What a reader wants first: what the adapter adds, in percent of the step without."""
    shown: Row = {"family": row["family"], "mask": row["mask"], "area": f"{row['area']:.1%}"}
    for source, name in (("guided source", "with"), ("plain source", "with_over_plain")):
        shown |= {f"{source}, {what}": f"{share:+.1%}" for what, share in row[f"{name}_share"].items()}
    return shown
