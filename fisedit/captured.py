"""Edits by captured graphs: one graph for every (bucket, batch, size), made on first use, replayed over all steps.

What a step reads of its source is gathered when the mask is known and copied into the graph's buffers before each
replay. In the loop nothing is allocated and the host waits for nothing. Knows nothing about samplers or masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fisedit.buckets import Place, bucket_of
from fisedit.cache import StepFeatures, StepMaps, StepOverlay
from fisedit.capture import Captured, Once, Outputs, capture
from fisedit.executor import Executor
from fisedit.fused import Buffers, Fused
from fisedit.graph import Role
from fisedit.plan import Reads, SparsePlan
from fisedit.sparse_kernels import ops

PREDICTION = "prediction"


@dataclass(eq=False)
class Slot:
    """A captured graph, its buffers, and whose tables lie in them."""

    buffers: Buffers
    captured: Captured
    owner: GraphEdit | None = None


class GraphExecutor:
    """Captured graphs of one UNet; editors may share them and take turns.

    Raises:
        UnsupportedModuleError: the UNet has a block without a fused form.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, self.fused = executor, Fused(executor.unet, executor.sites)
        self.graphs: Once[Slot] = Once()

    @torch.inference_mode()
    def begin(self, plans: Sequence[SparsePlan], steps: Mapping[int, StepFeatures], text: Tensor) -> GraphEdit:
        """Get ready to replay some steps of a source under one plan for each of E edits.

        Args:
            plans: of one size, on the model's device. steps: what the source's steps recorded, S branches each.
            text: embeddings [S * E, T, D], branch by branch.

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
        return GraphEdit(self.executor, slot, plans, steps, text)

    def _outputs(self, buffers: Buffers) -> Outputs:
        out, fresh, totals = self.fused(buffers)
        named = {PREDICTION: out, **{f"rows {name}": rows for name, rows in fresh.items()}}
        return named | {f"totals {name}": sums for name, sums in totals.items()}


class GraphEdit:
    """Some edits of one source on their way through its steps; made by `GraphExecutor.begin`."""

    def __init__(
        self,
        executor: Executor,
        slot: Slot,
        plans: Sequence[SparsePlan],
        steps: Mapping[int, StepFeatures],
        text: Tensor,
    ) -> None:
        self._executor, self._slot, self._plans, self._steps = executor, slot, plans, dict(steps)
        self._text = {s.name: type(s.module).forward(s.module, text) for s in executor.sites if s.role is Role.TEXT}
        self._loads = {i: self._gathered(step) for i, step in self._steps.items()}

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
        buffers, (targets, sources) = self._slot.buffers, self._loads[i]
        if self._slot.owner is not self:
            self._enter()
        buffers.latents.copy_(latents)
        buffers.timestep.copy_(timestep)
        torch._foreach_copy_(targets, sources)
        self._slot.captured.replay()
        return self._slot.captured.outputs[PREDICTION]

    @torch.inference_mode()
    def overlay(self, i: int) -> StepOverlay:
        """What the last step, which was the i-th, changed of its source, in memory of its own; for one edit alone."""
        (plan,), source = self._plans, self._steps[i]
        made, outputs = StepOverlay(source, plan), self._slot.captured.outputs
        for site in self._executor.sites:
            rows, totals = outputs.get(f"rows {site.name}"), outputs.get(f"totals {site.name}")
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

    def _gathered(self, step: StepFeatures) -> tuple[list[Tensor], list[Tensor]]:
        """Where in the buffers a step's features go, and the features."""
        buffers, pairs = self._slot.buffers, []
        for site in self._executor.sites:
            if site.role is Role.TOKENS:
                whole = step.maps[site.name] if isinstance(step, StepMaps) else step.whole(site.name, site.level)
                pairs.append((buffers.tokens[site.name], whole))
            for e, plan in enumerate(self._plans):
                level = plan.levels[site.level]
                if site.role in {Role.NORM, Role.NORM_HALO}:
                    recorded = step.rows(site.name, site.level, level.active)
                    outside = step.totals[site.name] - ops.group_sums(recorded, site.module.num_groups)
                    pairs.append((self._of(buffers.outside[site.name], e), outside))
                reads: Reads | None = {Role.NORM_HALO: level.same, Role.DOWN: level.down, Role.UP: level.up}.get(
                    site.role
                )
                if reads is not None and reads.halo.numel():
                    there = self._of(buffers.halo[site.name], e)[:, : reads.halo.numel()]
                    pairs.append((there, step.rows(site.name, site.level, reads.halo)))
        targets, sources = zip(*pairs, strict=True)
        return list(targets), list(sources)

    def _of(self, buffer: Tensor, edit: int) -> Tensor:
        """One edit's part [S, ...] of a buffer [B, ...]."""
        part: Tensor = buffer.unflatten(0, (-1, len(self._plans)))[:, edit]
        return part
