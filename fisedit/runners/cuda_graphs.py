"""Edits by captured graphs: one graph for every (bucket, batch, size), made on first use, replayed over all steps.

The features that a step reads of its source are gathered when the mask is known (see `packed_features`). They are
copied into the graph's buffers before each replay (see `prefetch`). In the loop nothing is allocated and the host waits
for nothing. Knows no samplers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fisedit.features.cache import CachedFeatures, FeatureOverlay
from fisedit.features.sites import Role, project_text
from fisedit.models.families.conditioning import Conditioning
from fisedit.runners.graph_capture import Captured, LRUCache, Outputs, PackedView, TensorPacker, capture
from fisedit.runners.packed_features import FeaturePacker
from fisedit.runners.prefetch import Prefetcher
from fisedit.runners.static_rows import SKIPPED, Buffers, StaticUNet
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels import tuning
from fisedit.sparse_kernels.buckets import RowPlacement, choose_bucket
from fisedit.sparse_kernels.operands import QUANTISED_DTYPES
from fisedit.sparse_kernels.row_plan import SparsePlan

PREDICTION = "prediction"

MAX_GRAPHS = 16
"""Graphs kept with their buffers; an edit takes one for each of its two dilations, one for its check, and one for its
shallow steps."""


@dataclass(eq=False)
class CachedGraph:
    """A captured graph, its buffers, and the UNet whose packed weights it reads.

    It also holds the mark of the edit whose tables are in the buffers. `verified` is true once a replay of it was
    compared with an eager step.
    """

    buffers: Buffers
    captured: Captured
    static_unet: StaticUNet
    owner: object = None
    verified: bool = False

    @cached_property
    def packer(self) -> TensorPacker:
        """Rows and statistics, to be copied for overlays; what skips the middle is where the down path reads it."""
        outputs = self.captured.outputs
        return TensorPacker({n: outputs[n] for n in outputs if n != PREDICTION and not n.endswith(SKIPPED)})


class GraphExecutor:
    """Captured graphs of one UNet; editors may share them and take turns.

    Args:
        executor: The executor of the UNet.
        quantised: The type of recorded keys and values: "int8" or "fp8" for a byte a number, "" for as they were
            recorded. A byte a number halves what a step reads and changes results a little (see `operands.quantise`).
            None for what FISEDIT_CODED says, or else "".

    Raises:
        UnsupportedModuleError: the UNet has a block that graphs cannot run.
        InputError: FISEDIT_CODED says something else.
    """

    def __init__(self, executor: Executor, *, quantised: str | None = None) -> None:
        name = tuning.quantisation_setting() if quantised is None else quantised
        kind = QUANTISED_DTYPES[name] if name else None
        self.executor = executor
        self.static_unet = StaticUNet(executor.unet, executor.sites, executor.weights, quantised=kind)
        self.feature_packer = FeaturePacker(executor.sites, self.static_unet.heads, kind)
        self.graphs = LRUCache[CachedGraph](MAX_GRAPHS)

    @torch.inference_mode()
    def begin(
        self,
        plans: Sequence[SparsePlan],
        steps: Mapping[int, CachedFeatures],
        text: Conditioning,
        budget: int | None = None,
        text_keys: dict[str, Tensor] | None = None,
        injected: frozenset[str] = frozenset(),
        shallow: bool = False,
    ) -> GraphEdit:
        """Get ready to replay some steps of a source under one plan for each of E edits.

        Args:
            plans: The plans of one size, one for each edit, on the model's device.
            steps: what the source's steps recorded, S branches each.
            text: The conditions of S * E items, branch by branch.
            budget: bytes of features that may stay on the device (see `prefetch`); None is no limit.
            text_keys: the text's keys and values by site name; those that are missing are filled in.
            injected: sites whose recorded queries or keys the last branch attends with (see `CachedRows`).
            shallow: the steps compute the last layer alone, over a map that is told (see `DeepMaps`).

        Returns:
            The edits, in one batch.
        """
        branches, rest = divmod(len(text), len(plans))
        assert not rest, (len(text), len(plans))
        grids = tuple((level.height, level.width) for level in plans[0].levels)
        bucket, device = choose_bucket(plans), self.executor.device

        def capture_graph() -> CachedGraph:
            buffers = self.static_unet.buffers(bucket, grids, len(plans), branches, text, sorted(injected), shallow)
            captured = capture(lambda: self._outputs(buffers), device)
            return CachedGraph(buffers, captured, self.static_unet)

        graph = self.graphs.get((bucket, grids, len(plans), branches, text.tokens, injected, shallow), capture_graph)
        text_keys = {} if text_keys is None else text_keys
        project_text(self.executor.sites, text.text, text_keys)
        inputs = {**text_keys, **text.added}
        return GraphEdit(self.executor, self.feature_packer, graph, plans, steps, inputs, branches, budget)

    def _outputs(self, buffers: Buffers) -> Outputs:
        out, fresh_rows, statistics = self.static_unet(buffers)
        named = {PREDICTION: out, **{f"rows {name}": rows for name, rows in fresh_rows.items()}}
        return named | {f"statistics {name}": sums for name, sums in statistics.items()}


class GraphEdit:
    """Some edits of one source on their way through its steps; made by `GraphExecutor.begin`."""

    def __init__(
        self,
        executor: Executor,
        feature_packer: FeaturePacker,
        graph: CachedGraph,
        plans: Sequence[SparsePlan],
        steps: Mapping[int, CachedFeatures],
        inputs: Mapping[str, Tensor],
        branches: int,
        budget: int | None,
    ) -> None:
        self._executor, self._graph, self._plans, self._steps = executor, graph, plans, dict(steps)
        self._inputs, self._edit_id, buffers = inputs, object(), graph.buffers
        gather_index = feature_packer.gather_index(buffers, plans, branches, next(iter(steps.values())))
        pointers = None if buffers.addresses is None else buffers.addresses.pointers
        self.prefetcher = Prefetcher(
            self._steps, lambda i: gather_index.gather(steps[i]), buffers.copied, budget, pointers
        )

    @property
    def placement(self) -> RowPlacement:
        """Positions of the prediction's rows."""
        return self._graph.buffers.tables.levels[0].placement

    @property
    def verified(self) -> bool:
        """Return whether a replay of the graph was compared with an eager step."""
        return self._graph.verified

    @verified.setter
    def verified(self, value: bool) -> None:
        self._graph.verified = value

    @torch.inference_mode()
    def step(self, i: int, latents: Tensor, timestep: Tensor, changes: Sequence[Tensor] = ()) -> Tensor:
        """One sparse evaluation.

        Args:
            i: a step that was given.
            latents: [B, 4, h, w], scaled for the model.
            timestep: one number.
            changes: each edit's `DeepMaps.change`, where the steps are shallow.

        Returns:
            The prediction at the padded active rows [B, R, 4], in the graph's own memory: read it before the next step.
        """
        buffers, later = self._graph.buffers, [j for j in self._steps if j > i]
        if self._graph.owner is not self._edit_id:
            self._write_buffers()
        buffers.latents.copy_(latents)
        buffers.timestep.copy_(timestep)
        for e, change in enumerate(changes):
            assert buffers.deep is not None, i
            buffers.deep[e :: len(changes), : change.shape[1]].copy_(change)
        self.prefetcher.load(i, min(later, default=None))
        self._graph.captured.replay()
        return self._graph.captured.outputs[PREDICTION]

    @torch.inference_mode()
    def overlays(self, i: int) -> list[FeatureOverlay]:
        """Each edit's overlay after the last step, which was the i-th; those of a batch share memory of their own."""
        source, each = self._steps[i], len(self._plans)
        flats = self._graph.packer.copies()
        shallow = self._graph.buffers.deep is not None
        overlays = [
            FeatureOverlay(source, plan, share=each, joined=self._joined, shallow=shallow) for plan in self._plans
        ]
        for overlay, found in zip(overlays, self._overlay_views, strict=True):
            for kind, site, view in found:
                if kind == "statistics":
                    overlay.statistics[site] = view.unpack(flats)
                elif site in source:
                    overlay.maps[site] = view.unpack(flats)
        return overlays

    def recorded(self, name: str) -> list[Tensor]:
        """The rows [S, R, C] that each edit's last step read of its source, in the graph's own memory.

        Args:
            name: name of a norm before a 3x3 conv.
        """
        rows, each, level = self._graph.buffers.rows[f"active {name}"], len(self._plans), self._levels[name]
        return [rows[e::each, : plan.levels[level].rows] for e, plan in enumerate(self._plans)]

    @cached_property
    def _levels(self) -> dict[str, int]:
        return {site.name: site.level for site in self._executor.sites}

    @cached_property
    def _joined(self) -> dict[str, str]:
        outputs = self._graph.captured.outputs
        return {site.name: site.skip for site in self._executor.sites if f"rows {site.name}{SKIPPED}" in outputs}

    @cached_property
    def _overlay_views(self) -> list[list[tuple[str, str, PackedView]]]:
        """Return for every edit what its overlays hold, and where: of queries the last branch's alone."""
        each, queries = len(self._plans), {site.name for site in self._executor.sites if site.role is Role.QUERY}
        found: list[list[tuple[str, str, PackedView]]] = [[] for _ in self._plans]
        for name, view in self._graph.packer.views.items():
            kind, _, site = name.partition(" ")
            for e, plan in enumerate(self._plans):
                first = view.shape[0] - each + e if site in queries else e
                rows = view.shape[1] if kind == "statistics" else plan.levels[self._levels[site]].rows
                found[e].append((kind, site, view.strided_slice(first, each, rows)))
        return found

    def _write_buffers(self) -> None:
        """Write tables and text into buffers that another edit wrote last."""
        buffers = self._graph.buffers
        buffers.tables.write(self._plans)
        for name, tensor in (buffers.text_keys | buffers.added).items():
            tensor.copy_(self._inputs[name])
        self._graph.owner = self._edit_id
