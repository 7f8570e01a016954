"""The answers that a region asks of an edit: where words attend, what lies under points, and the cost to know it.

Joins regions to recorded trajectories; runs no edit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fisedit.masking import masks
from fisedit.masking.localize import num_probes, predict_mask, restrict_to_words, source_segments
from fisedit.masking.mask_options import OBJECT_MASKS
from fisedit.values import EditKind, EditMask, MaskSource

if TYPE_CHECKING:
    from torch import Tensor

    from fisedit.masking.mask_options import MaskOptions
    from fisedit.masking.region_values import Points
    from fisedit.models.families.conditioning import Conditioning
    from fisedit.sampling.engine import Engine
    from fisedit.sampling.trajectory import Trajectory
    from fisedit.values import BoolGrid, EditScript, GenerationConfig


class EditScope:
    """An edit as its region sees it.

    Args:
        engine: The engine that recorded the source.
        source: the trajectory that is edited.
        config: The config of the edit.
        text: the new prompt's conditions, and its keys and values by cross-attention.
        script: what the prompt changes.
        dense_macs: multiply-accumulates of a dense step.

    Attributes:
        probes: dense evaluations that were spent.
        macs: multiply-accumulates of those.
    """

    def __init__(
        self,
        engine: Engine,
        source: Trajectory,
        config: GenerationConfig,
        text: tuple[Conditioning, dict[str, Tensor]],
        script: EditScript,
        dense_macs: int,
    ) -> None:
        self._engine, self._source, self._config, self._text, self._script = engine, source, config, text, script
        self._dense_macs = dense_macs
        self.cells = engine.grids(config)[0]
        self.probes = self.macs = 0
        self._by_words: dict[MaskOptions, tuple[EditMask, str]] = {}

    def by_words(self, options: MaskOptions) -> tuple[EditMask, str]:
        """The mask of words, and why it is the whole picture, or "".

        Args:
            options: The words, and how they are localized.

        Raises:
            MaskError: fewer components than `instance` asks for. NumericsError: NaN in recorded attention.
        """
        if options not in self._by_words:
            self._by_words[options] = self._find(options)
        return self._by_words[options]

    def by_points(self, inside: Points, outside: Points) -> BoolGrid:
        """The cells of the things under some points, without those under others: booleans [h, w].

        Args:
            inside: (x, y) in pixels of the canvas, one or more.
            outside: likewise.

        Raises:
            NumericsError: NaN in recorded attention.
        """
        from scipy.ndimage import binary_fill_holes

        tree = source_segments(self._engine, self._source, self._config)
        picked = tree.pick(*([(int(y), int(x)) for x, y in points] for points in (inside, outside)))
        filled: BoolGrid = binary_fill_holes(masks.grid_of_mask(picked, *picked.shape))
        return filled

    def _find(self, options: MaskOptions) -> tuple[EditMask, str]:
        script = restrict_to_words(self._script, options.words, self._engine) if options.words else self._script
        if script.kind is EditKind.GLOBAL or (script.kind is EditKind.IDENTICAL and not options.words):
            return self._everywhere(), f"{script.kind.value} edit: {script.reason or 'no words changed'}"
        mask = predict_mask(self._engine, self._source, self._config, self._text, script, options)
        self._account(num_probes(script, options), options)
        if mask.confidence >= masks.LOW_CONFIDENCE:
            return mask, ""
        reason = f"the words point nowhere in particular (confidence {mask.confidence:.2f}); give a mask to be exact"
        return replace(self._everywhere(), confidence=mask.confidence, heatmap=mask.heatmap), reason

    def _everywhere(self) -> EditMask:
        return EditMask(np.ones(self.cells, bool), MaskSource.EVERYWHERE)

    def _account(self, probes: int, options: MaskOptions) -> None:
        """Add dense evaluations; "things" runs one branch of its last."""
        step = self._dense_macs
        single_branch = probes and options.method == OBJECT_MASKS
        self.probes += probes
        self.macs += probes * step - (step - step // self._engine.batch(self._config) if single_branch else 0)
