"""Edits by captured graphs: one graph for every (bucket, batch, size), made on first use, replayed over all steps.

What a step reads of its source is gathered when the mask is known (see `records`) and copied into the graph's buffers
before each replay (see `feed`). In the loop nothing is allocated and the host waits for nothing. Knows no samplers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fisedit.buckets import Place, bucket_of
from fisedit.cache import StepFeatures, StepOverlay
from fisedit.capture import Captured, Once, Outputs, capture
from fisedit.executor import Executor
from fisedit.feed import Feed
from fisedit.fused import SKIPPED, Buffers, Fused
from fisedit.graph import Role
from fisedit.plan import SparsePlan
from fisedit.records import Records

PREDICTION = "prediction"


@dataclass(eq=False)
class Slot:
    """A captured graph, its buffers, and whose tables lie in them."""

    buffers: Buffers
    captured: Captured
    owner: GraphEdit | None = None


class GraphExecutor:
    """Captured graphs of one UNet; editors may share them and take turns.

    Args:
        executor: of the UNet.
        coded: recorded keys and values are read in a byte a number, which halves what a step reads and changes results
            a little.

    Raises:
        UnsupportedModuleError: the UNet has a block without a fused form.
    """

    def __init__(self, executor: Executor, *, coded: bool = False) -> None:
        self.executor, self.fused = executor, Fused(executor.unet, executor.sites, coded=coded)
        self.records, self.graphs = Records(executor.sites, self.fused.heads), Once[Slot]()

    @torch.inference_mode()
    def begin(
        self,
        plans: Sequence[SparsePlan],
        steps: Mapping[int, StepFeatures],
        text: Tensor,
        budget: int | None = None,
    ) -> GraphEdit:
        """Get ready to replay some steps of a source under one plan for each of E edits.

        Args:
            plans: of one size, on the model's device. steps: what the source's steps recorded, S branches each.
            text: embeddings [S * E, T, D], branch by branch.
            budget: bytes of features that may stay on the device (see `feed`); None is no limit.

        Returns:
            The edits, in one batch.
        """
        branches, rest = divmod(len(text), len(plans))
        assert not rest, (len(text), len(plans))
        grids = tuple((level.height, level.width) for level in plans[0].levels)
        bucket, tokens, device = bucket_of(plans), text.shape[1], self.executor.unet.device

        def make() -> Slot:
            buffers = self.fused.buffers(bucket, grids, len(plans), branches, tokens)
            return Slot(buffers, capture(lambda: self._outputs(buffers), device))

        slot = self.graphs.get((bucket, grids, len(plans), branches, tokens), make)
        return GraphEdit(self.executor, self.records, slot, plans, steps, text, budget)

    def _outputs(self, buffers: Buffers) -> Outputs:
        out, fresh, totals = self.fused(buffers)
        named = {PREDICTION: out, **{f"rows {name}": rows for name, rows in fresh.items()}}
        return named | {f"totals {name}": sums for name, sums in totals.items()}


class GraphEdit:
    """Some edits of one source on their way through its steps; made by `GraphExecutor.begin`."""

    def __init__(
        self,
        executor: Executor,
        records: Records,
        slot: Slot,
        plans: Sequence[SparsePlan],
        steps: Mapping[int, StepFeatures],
        text: Tensor,
        budget: int | None,
    ) -> None:
        self._executor, self._slot, self._plans, self._steps = executor, slot, plans, dict(steps)
        self._text = {s.name: type(s.module).forward(s.module, text) for s in executor.sites if s.role is Role.TEXT}
        buffers = slot.buffers
        index = records.index(buffers.rows, plans, len(text) // len(plans))
        loads = {i: records.gather(step, index) for i, step in self._steps.items()}
        self.feed = Feed(loads, buffers.copied, budget, buffers.addresses)

    @property
    def place(self) -> Place:
        """Where the prediction's rows stand."""
        return self._slot.buffers.tables.levels[0].place

    @torch.inference_mode()
    def step(self, i: int, latents: Tensor, timestep: Tensor) -> Tensor:
        """One sparse evaluation.

        Args:
            i: a step that was given. latents: [B, 4, h, w], scaled for the model. timestep: one number.

        Returns:
            The prediction at the padded active rows [B, R, 4], in the graph's own memory: read it before the next step.
        """
        buffers, later = self._slot.buffers, [j for j in self._steps if j > i]
        if self._slot.owner is not self:
            self._enter()
        buffers.latents.copy_(latents)
        buffers.timestep.copy_(timestep)
        self.feed.load(i, min(later, default=None))
        self._slot.captured.replay()
        return self._slot.captured.outputs[PREDICTION]

    @torch.inference_mode()
    def overlay(self, i: int) -> StepOverlay:
        """What the last step, which was the i-th, changed of its source, in memory of its own; for one edit alone."""
        (plan,), source = self._plans, self._steps[i]
        made, outputs = StepOverlay(source, plan), self._slot.captured.outputs
        for site in self._executor.sites:
            rows, totals = outputs.get(f"rows {site.name}"), outputs.get(f"totals {site.name}")
            skipped = outputs.get(f"rows {site.name}{SKIPPED}")
            rows = rows if rows is None or skipped is None else torch.cat([rows, skipped], 2)
            if rows is not None and site.name in source:
                kept = rows[-1:] if site.role is Role.QUERY else rows
                made.maps[site.name] = kept[:, : plan.levels[site.level].rows].clone()
            if totals is not None:
                made.totals[site.name] = totals.clone()
        return made

    def _enter(self) -> None:
        """Write tables and text into buffers that another edit wrote last."""
        buffers = self._slot.buffers
        buffers.tables.write(self._plans)
        for name, rows in self._text.items():
            buffers.text[name].copy_(rows)
        self._slot.owner = self
