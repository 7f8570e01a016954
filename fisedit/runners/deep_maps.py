"""Deep maps of an edit's shallow steps, told from its last full steps and from the source's own.

A shallow step computes a UNet's first conv and last layer alone (DeepCache, arXiv 2312.00858). The map that enters the
last layer changes little from step to step, and its change is told from the last two full ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fisedit.features.cache import ShiftedFeatures

if TYPE_CHECKING:
    from torch import Tensor

    from fisedit.features.cache import CachedFeatures, FeatureOverlay, StepFeatures
    from fisedit.sparse.blocks import ShallowBlocks
    from fisedit.sparse_kernels.row_plan import SparsePlan

SOURCE_SHARE = 0.5
"""Share of the source's change since the last full step that is added to the edit's own map."""

TREND_SHARE = 0.4
"""Share of the change between the last two full steps, for as many steps, that goes on.

Both were chosen on 16 swaps of 256 px in 25 steps (development seeds from 5000 on). With all of the source's change and
no trend, every second step shallow after the first third lost 4 dB of the median."""


@dataclass(frozen=True, eq=False)
class FullStep:
    """A full step, and its own map less `SOURCE_SHARE` of the source's, at rows or everywhere without a plan."""

    i: int
    plan: SparsePlan | None
    change: Tensor

    def at(self, active: Tensor) -> Tensor:
        """The change [B, R, C] at positions that the step computed."""
        rows = active if self.plan is None else self.plan.levels[0].row_of_position[active]
        return self.change.index_select(1, rows)


class DeepMaps:
    """The deep maps of one edit.

    Args:
        blocks: The blocks of its shallow steps, which name the map.
    """

    def __init__(self, blocks: ShallowBlocks) -> None:
        self._entry, self._channels = blocks.entry, blocks.channels
        self._full: list[FullStep] = []

    def full_step(self, i: int, overlay: FeatureOverlay, recorded: Tensor | None = None) -> FullStep:
        """Return what a full step made of the map.

        Args:
            i: the step.
            overlay: The overlay that the step filled, not yet encoded.
            recorded: the source's map at its active rows, perhaps with more channels; None if it is to be read.
        """
        own = overlay.own_rows(self._entry)[..., : self._channels]
        before = self._recorded(overlay) if recorded is None else recorded[..., : self._channels]
        return FullStep(i, overlay.plan, own - SOURCE_SHARE * before)

    def keep(self, step: FullStep) -> None:
        """Keep a full step, and the one before it."""
        self._full = [*self._full[-1:], step]

    def keep_dense(self, i: int, features: StepFeatures, source: CachedFeatures) -> None:
        """Keep what a dense step made of the map.

        Args:
            i: the step.
            features: The features that it recorded, not yet encoded.
            source: The features of the source's step.
        """
        own, recorded = (step.whole(self._entry, 0)[..., : self._channels] for step in (features, source))
        self.keep(FullStep(i, None, own - SOURCE_SHARE * recorded))

    def _recorded(self, overlay: FeatureOverlay) -> Tensor:
        """The source's own map at an overlay's active rows, without what an edit's dense steps found changed."""
        step = overlay.parent
        step = step.parent if isinstance(step, ShiftedFeatures) and step.own is None else step
        return step.rows(self._entry, 0, overlay.plan.levels[0].active)[..., : self._channels]

    def begin(self, i: int, overlay: FeatureOverlay) -> None:
        """Begin a shallow step with the map as it is told.

        Args:
            i: the step.
            overlay: An empty one with the step's plan, as in `change`.
        """
        found = self.change(i, overlay.plan) + SOURCE_SHARE * self._recorded(overlay)
        overlay.maps[self._entry], overlay.shallow = found, True

    def change(self, i: int, plan: SparsePlan) -> Tensor:
        """The map of a shallow step as it is told, less `SOURCE_SHARE` of the source's: [B, R, C].

        Args:
            i: the step.
            plan: The step's plan, whose rows the full steps before it computed too.
        """
        active, last = plan.levels[0].active, self._full[-1]
        found = last.at(active)
        for before in self._full[:-1]:
            trend = last.at(active) - before.at(active)
            found = found + TREND_SHARE * (i - last.i) / (last.i - before.i) * trend
        return found
