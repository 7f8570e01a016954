"""`python -m benchmarks.adapters`: the time that a reference adapter (arXiv 2410.22901) adds to a sparse step.

Weights are random: of Stable Diffusion 1.5's architecture unless a model is named, and of every family's adapter. The
same step is run without an adapter and with one, at the dilation of `workload`. With an adapter it runs over a source
that was made with it, and over a source that was not. Shares are of the step without, in the median over turns, so that
a machine whose speed drifts has little effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fisedit.adapters.base import AdapterStack
from fisedit.adapters.insertion_points import record_maps
from fisedit.adapters.row_column.checkpoints import fresh_adapter
from fisedit.adapters.row_column.cost import dense_macs, sparse_macs
from fisedit.adapters.row_column.reader import ReferenceCondition, match_unet
from fisedit.bench.speed import Row, settings_dict
from fisedit.bench.timing import seconds_by_round
from fisedit.bench.workload import STEP_DILATION, load_workload, masks_of_areas
from fisedit.costs.macs import unet_macs
from fisedit.features.cache import FeatureOverlay
from fisedit.features.codec import choose_encoding
from fisedit.machine.malloc import keep_freed_memory
from fisedit.sampling.engine import Engine
from fisedit.values import OnStep

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.adapters.row_column.attention import RowColumnAdapter
    from fisedit.bench.settings import SpeedSettings
    from fisedit.bench.workload import Workload
    from fisedit.features.cache import StepFeatures
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import BoolGrid


def measure_adapter_speed(
    settings: SpeedSettings, families: Sequence[str], on_step: OnStep | None = None
) -> dict[str, Any]:
    """Time steps with and without adapters over squares and ragged masks.

    Args:
        settings: The settings of the benchmark.
        families: Names of adapters' families.
        on_step: called before every measurement with (i, n, None).

    Returns:
        {"settings", "dense", "rows", "summary"}, ready for JSON; times in seconds, shares of the step without.

    Raises:
        AdapterError: there is no such family.
    """
    keep_freed_memory()
    workload, masks = load_workload(settings), masks_of_areas(settings.areas, settings.size)
    rows: list[Row] = []
    with torch.inference_mode():
        benchmark = _AdapterBenchmark(workload, settings.repeats)
        for family in families:
            condition = benchmark.condition(random_adapter(workload.pipe.unet, family))
            conditioned = benchmark.record([condition])
            for name, area, grid in masks:
                if on_step is not None:
                    on_step(len(rows), len(families) * len(masks), None)
                row = benchmark.measure_mask(condition, conditioned, grid)
                rows.append({"family": family, "mask": name, "asked_area": area} | row)
    report = settings_dict(workload, settings)
    return {"settings": report, "dense": benchmark.dense, "rows": rows, "summary": [_summary_row(row) for row in rows]}


@torch.inference_mode(mode=False)
@torch.no_grad()
def random_adapter(unet: UNet2DConditionModel, family: str) -> RowColumnAdapter:
    """An adapter with random weights whose gains are of order one, laid out as in an editor.

    Args:
        unet: The UNet that it fits.
        family: its name.
    """
    adapter = match_unet(fresh_adapter(unet, family), unet)
    generator = torch.Generator(unet.device).manual_seed(0)
    for name, weights in adapter.named_parameters():
        if weights.ndim > 1:
            weights.normal_(0, weights[0].numel() ** -0.5, generator=generator)
        else:
            weights.fill_(name.endswith("weight"))
    return adapter.eval().requires_grad_(False)


class _AdapterBenchmark:
    """One engine and one source, recorded without an adapter; `dense` is a dense step's MACs and what families add."""

    def __init__(self, workload: Workload, repeats: int) -> None:
        self.engine = Engine(workload.pipe, encoding=choose_encoding("auto", workload.device))
        self.config, self.repeats = workload.config, repeats
        self.text = self.engine.encode(self.config)
        sampler = self.engine.sampler(self.config)
        self.timestep = sampler.timesteps[len(sampler.timesteps) // 2]
        self.latents = torch.cat([sampler.latents] * self.engine.batch(self.config))
        self.plain = self.record([])
        self.dense: Row = {"macs": self._macs(self.engine.sizes(self.config))}

    def condition(self, adapter: RowColumnAdapter) -> ReferenceCondition:
        """An adapter with the keys and values of a random reference."""
        unet, name = self.engine.pipe.unet, adapter.family.name
        self.dense[name] = len(self.latents) * dense_macs(adapter, unet, self.engine.grids(self.config))
        maps = record_maps(unet, self.latents, self.text.text, tuple(adapter.channels))
        return ReferenceCondition(adapter, adapter.read(maps), 1.0, name)

    def record(self, conditions: list[ReferenceCondition]) -> StepFeatures:
        """A source's step, made with adapters."""
        layers = AdapterStack(conditions) if conditions else None
        _, features = self.engine.executor.run_dense(self.latents, self.timestep, self.text, {}, extra_layers=layers)
        features.encode(self.engine.encoding)
        return features

    def measure_mask(self, condition: ReferenceCondition, conditioned: StepFeatures, grid: BoolGrid) -> Row:
        """Three steps over one mask [h, w], which take turns."""
        plan = self.engine.row_plan(grid, STEP_DILATION)
        times = seconds_by_round(
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
        row: Row = {"area": float(grid.mean()), "macs": macs, "turns": times}
        row["seconds"] = {name: median(seconds) for name, seconds in times.items()}
        for name in ("with", "with_over_plain"):
            pairs = [a / b - 1 for a, b in zip(times[name], times["without"], strict=True)]
            row[f"{name}_share"] = {"macs": macs[name] / macs["without"] - 1, "seconds": median(pairs)}
        return row

    def _macs(self, rows: Sequence[int]) -> int:
        """Return the multiply-accumulates of the UNet's step that computes so many rows."""
        sizes = self.engine.sizes(self.config)
        return unet_macs(self.engine.executor.sites, rows, sizes, len(self.latents), self.text.tokens)

    def _step(
        self, plan: SparsePlan, source: StepFeatures, conditions: list[ReferenceCondition]
    ) -> Callable[[], object]:
        text: dict[str, Tensor] = {}
        inputs, extra_layers = (self.latents, self.timestep, self.text, text), AdapterStack(conditions)
        return lambda: self.engine.executor.run_sparse(*inputs, FeatureOverlay(source, plan), extra_layers=extra_layers)


def _summary_row(row: Row) -> Row:
    """Return the cost that the adapter adds, in percent of the step without."""
    shown: Row = {"family": row["family"], "mask": row["mask"], "area": f"{row['area']:.1%}"}
    for source, name in (("guided source", "with"), ("plain source", "with_over_plain")):
        shown |= {f"{source}, {quantity}": f"{share:+.1%}" for quantity, share in row[f"{name}_share"].items()}
    return shown


if __name__ == "__main__":
    from benchmarks.commands import run

    run("adapters")
