"""What an edit will cost, from the graph and a mask: active rows, multiply-accumulates, and when dense is cheaper.

Knows shapes and measured constants; runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from fisedit.adapters.cost import dense_macs, sparse_macs
from fisedit.sampling.denoise import Engine
from fisedit.sparse.modules import LayerSite
from fisedit.sparse.profiling import decoder_macs, text_macs, unet_macs
from fisedit.sparse.vae_tiles import Areas, box_areas, frame_areas
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import active_rows, make_plan
from fisedit.values import WHOLE, GenerationConfig

if TYPE_CHECKING:
    import torch

    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import BoolGrid

GROWTHS = ((2, 1), (4, 3), (5, 5))
"""Latent cells computed beyond the mask by default, in the first and the second half of the steps. The first pair costs
a tenth more than 1 throughout, and its tenth percentile is 3 dB better (`fisedit bench fidelity`); the others come
nearer to the dense edit, and are taken where they cost hardly any time.

Nearer than all of them comes a single cell with dense steps in between, which tell what changes outside the mask."""

BETWEEN = 0.2
"""Share of the steps that run dense, where some do: of 25 steps 5. The first of all is one, as the early steps decide
what an edit makes of a place. With 4 of them, edits in our own masks come near to 28 dB in the tenth
percentile; 7 bring a decibel more for a tenth of the time."""

EARLIER = 1.4
"""How much closer the earlier ones lie: they are where the k-th of n equal parts begins, k / n to this power."""

FREE = 1.1
"""How many times the first pair's time a wider one may take."""

FIXED = {"cpu": 10e9, "cuda": 165e9}
"""Device -> what a step takes whatever it computes, in multiply-accumulates of its time.

On two Zen 5 cores 50 ms, measured, for calls and for reading weights: nearly all of a small model's step, and little of
Stable Diffusion's. Of a captured step on a GPU an estimate, as none was measured yet: the floor of a step at 5 %, which
is 1.3 ms, is worth 214e9 at a third of an H200's peak of 494e12 a second, and such a step's own are 50e9. The rest is
1 ms, for reading the weights and for 250 kernels: a larger part of a step than on a CPU."""

BREAK_EVEN = 0.78
"""Share of a dense step's multiply-accumulates from which a step runs dense, which is exact and costs hardly more.

In bf16 at 512 px a sparse step was 1.4 times faster than a dense one at 66 % in uneven blobs, 1.2 at 77 % in a square
and as fast at 79 % in blobs on two Zen 5 cores; 1.2 at 78 %, 1.1 at 83 % and as fast at 90 % on two Xeon cores without
AMX."""


def spread(first: int, then: int, steps: int, share: float = 0.5) -> tuple[int, ...]:
    """Latent cells to compute beyond the mask, for every step: so many for a share of them, and so many then."""
    early = ceil(share * steps)
    return (first,) * early + (then,) * (steps - early)


def mixed(steps: int, start: int = 0, share: float = BETWEEN) -> tuple[int, ...]:
    """A single cell, and dense steps in between from the first to run on: (WHOLE, 1, 1, WHOLE, ...)."""
    left = steps - start
    count = ceil(round(share * left, 6))  # 7 / 25 of 25 is 7
    dense = {start + round(left * (k / count) ** EARLIER) for k in range(count)}
    return tuple(WHOLE if i in dense else 1 for i in range(steps))


def fixed(device: torch.device) -> float:
    """What a step takes on a device whatever it computes, in multiply-accumulates of its time (see `FIXED`)."""
    return FIXED.get(device.type, FIXED["cpu"])


class Costs:
    """Prices for one config on one engine.

    Args:
        recorded: the source was made with the config's adapters, so that edits look at all that they recorded.
    """

    def __init__(self, engine: Engine, config: GenerationConfig, *, recorded: bool = False) -> None:
        self._engine, self._recipe, self._recorded = engine, config, recorded
        self.sizes = engine.sizes(config)

    def rows(self, grid: BoolGrid, growth: Sequence[int]) -> tuple[int, ...]:
        """Active rows of every level at the widest growth of a sparse step."""
        return self._rows(grid, max((cells for cells in growth if cells < WHOLE), default=WHOLE))

    def dense_step(self) -> int:
        """MACs of a dense step, projecting the text included."""
        text = text_macs(self._sites, self._batch, self._tokens)
        return self._step(self.sizes) + text + self._guided(None)

    def branch(self) -> int:
        """MACs of one branch of a dense step, projecting the text and adapters apart."""
        return self._step(self.sizes) // self._batch

    def sparse_step(self, grid: BoolGrid, growth: int) -> int:
        """MACs of a sparse step, or of a dense one among them; the text was projected before."""
        return self._sparse(dilate(grid, growth)) if growth < WHOLE else self._step(self.sizes) + self._guided(None)

    def check(self, grid: BoolGrid, growth: int, cells: BoolGrid) -> int:
        """MACs that computing other cells [h, w] besides adds to a sparse step."""
        if growth == WHOLE:
            return 0
        return self._sparse(dilate(grid, growth) | cells) - self.sparse_step(grid, growth)

    def dense(self, start: int = 0) -> int:
        """MACs of a dense run: every step from `start` on, and the decode."""
        steps = self._steps - start
        return steps * self.dense_step() + self._decode(frame_areas(self.sizes[0]))

    def sparse(self, grid: BoolGrid, growth: Sequence[int], start: int = 0) -> int:
        """MACs of a sparse run over a mask, from step `start` on."""
        once = text_macs(self._sites, self._batch, self._tokens) + self._decode(box_areas(grid))
        return self._sparse_steps(grid, growth[start:]) + once

    def growth(self, grid: BoolGrid, start: int = 0, *, plain: bool = False) -> tuple[int, ...]:
        """Latent cells to compute beyond a mask at every step: of all that cost hardly more time than the fewest, what
        comes nearest to a dense run.

        Args:
            start: the first step to run. plain: no dense steps in between; nor are there any with adapters or captured
                graphs.
        """
        least, *wider = (spread(*pair, self._steps) for pair in GROWTHS)
        if not (plain or self._recipe.like or self._engine.graphs.on(self._engine.executor.device)):
            wider.append(mixed(self._steps, start))
        allowed = FREE * self._time(grid, least[start:])
        affordable = (g for g in reversed(wider) if self._time(grid, g[start:]) <= allowed)
        fits = (g for g in affordable if not self.dense_is_cheaper(grid, g))
        return next(fits, least)

    def _time(self, grid: BoolGrid, growth: Sequence[int]) -> float:
        """Of a sparse run's steps, in multiply-accumulates."""
        return fixed(self._engine.executor.device) * len(growth) + self._sparse_steps(grid, growth)

    def _sparse_steps(self, grid: BoolGrid, growth: Sequence[int]) -> int:
        """MACs of a sparse run's steps."""
        steps = {cells: self.sparse_step(grid, cells) for cells in set(growth)}
        return sum(steps[cells] for cells in growth)

    def dense_is_cheaper(self, grid: BoolGrid, growth: Sequence[int]) -> str:
        """Why a mask is too large to be worth a sparse run, or ""."""
        if grid.all():
            return "the mask covers everything"
        share = self._step(self.rows(grid, growth)) / self._step(self.sizes)
        return f"at {share:.0%} of a dense step, dense is as fast" if share > BREAK_EVEN else ""

    @cached_property
    def _batch(self) -> int:
        return self._engine.batch(self._recipe)

    @property
    def _sites(self) -> tuple[LayerSite, ...]:
        return self._engine.executor.sites

    @property
    def _tokens(self) -> int:
        return int(self._engine.pipe.tokenizer.model_max_length)

    @property
    def _steps(self) -> int:
        return self._recipe.num_inference_steps

    def _rows(self, grid: BoolGrid, growth: int) -> tuple[int, ...]:
        return active_rows(dilate(grid, growth), self._engine.executor.depth)

    def _step(self, rows: Sequence[int]) -> int:
        return unet_macs(self._sites, rows, self.sizes, self._batch, self._tokens)

    def _sparse(self, cells: BoolGrid) -> int:
        """MACs of a step that computes these cells [h, w]."""
        depth = self._engine.executor.depth
        plan = make_plan(cells, depth) if self._recipe.like else None
        return self._step(active_rows(cells, depth)) + self._guided(plan)

    def _guided(self, plan: SparsePlan | None) -> int:
        """MACs of a step's adapters, dense without a plan."""
        unet, grids, total = self._engine.pipe.unet, self._engine.grids(self._recipe), 0
        for like in self._recipe.like:
            adapter = self._engine.references.adapter(like)
            if plan is None:
                total += dense_macs(adapter, unet, grids)
            else:
                total += sparse_macs(adapter, unet, plan, recorded=self._recorded)
        return self._batch * total

    def _decode(self, areas: Areas) -> int:
        return decoder_macs(self._engine.pipe.vae, areas, self.sizes[0])
