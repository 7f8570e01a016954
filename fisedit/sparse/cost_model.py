"""What an edit will cost, from layer sites and a mask: active rows, multiply-accumulates, and when dense is cheaper.

MACs are counted from the layers: output rows times weights, plus 2 * queries * keys * width for attention. Norms and
activations count nothing, as in torch's FlopCounterMode. Knows shapes and measured constants; runs nothing, and knows
neither samplers nor adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from diffusers.models.attention_processor import Attention
from torch import nn

from fisedit.sparse.modules import LayerSite, Role, num_levels
from fisedit.sparse.vae_tiles import Areas, box_areas, frame_areas
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import count_active_rows, make_plan
from fisedit.values import DENSE_STEP

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL

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
    """A single cell, and dense steps in between from the first to run on: (DENSE_STEP, 1, 1, DENSE_STEP, ...)."""
    left = steps - start
    count = ceil(round(share * left, 6))  # 7 / 25 of 25 is 7
    dense = {start + round(left * (k / count) ** EARLIER) for k in range(count)}
    return tuple(DENSE_STEP if i in dense else 1 for i in range(steps))


def fixed(device: torch.device) -> float:
    """What a step takes on a device whatever it computes, in multiply-accumulates of its time (see `FIXED`)."""
    return FIXED.get(device.type, FIXED["cpu"])


SHIFT = {Role.DOWN: 1, Role.UP: -1}
"""Levels between a sampler's input and its output."""


def unet_macs(sites: Sequence[LayerSite], rows: Sequence[int], sizes: Sequence[int], batch: int, tokens: int) -> int:
    """Multiply-accumulates of one UNet evaluation, the text's projections aside.

    Args:
        sites: of the UNet.
        rows: rows computed at each level, finest first (all positions for a dense one).
        sizes: positions of each level.
        batch: B.
        tokens: T.
    """
    total = 0
    for site in sites:
        if site.role is Role.TEXT:
            continue
        total += rows[site.level + SHIFT.get(site.role, 0)] * site.weights
        if site.role is Role.QUERY:
            keys = tokens if site.cross else sizes[site.level]
            total += 2 * rows[site.level] * keys * site.module.out_features
    return batch * total


def text_macs(sites: Sequence[LayerSite], batch: int, tokens: int) -> int:
    """Multiply-accumulates of projecting the text for every cross-attention once."""
    return batch * tokens * sum(site.weights for site in sites if site.role is Role.TEXT)


def decoder_macs(vae: AutoencoderKL, areas: Areas, latent_size: int) -> int:
    """Multiply-accumulates of a decode.

    Args:
        vae: whose decoder it is.
        areas: cells read and computed at each resolution, see `fisedit.sparse.vae_tiles.Areas`.
        latent_size: h * w, the keys of the middle attention.
    """
    total = vae.post_quant_conv.weight.numel() * areas[0][0] if vae.post_quant_conv is not None else 0
    for name, module in vae.decoder.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            total += module.weight.numel() * _decoder_cells(name, areas)
        elif isinstance(module, Attention):
            total += 2 * areas[0][1] * latent_size * int(module.to_q.weight.shape[0])
    return total


def _decoder_cells(name: str, areas: Areas) -> int:
    """Cells a layer computes."""
    if not name.startswith("up_blocks."):
        return areas[0 if name.startswith(("conv_in", "mid_block")) else -1][1]
    level = int(name.split(".")[1])
    return areas[level + 1][0] if ".upsamplers." in name else areas[level][1]


@dataclass(frozen=True, eq=False)
class CostedLayers:
    """The layers that costs are counted of.

    Args:
        sites: of the UNet.
        vae: whose decoder runs at the end.
        grids: (height, width) of every level, finest first.
        tokens: T.
    """

    sites: tuple[LayerSite, ...]
    vae: AutoencoderKL
    grids: Sequence[tuple[int, int]]
    tokens: int


class Costs:
    """Costs of a run's steps and decode.

    Args:
        layers: of the UNet and the decoder.
        steps: N.
        batch: B, the branches of one evaluation.
        device: where it runs.
        captured: whether sparse steps run by captured graphs.
        adapter_macs: a sparse step's plan, or None for a dense step -> multiply-accumulates of one branch of its
            adapters; None where there are none.
    """

    def __init__(
        self,
        layers: CostedLayers,
        steps: int,
        batch: int,
        device: torch.device,
        captured: bool = False,
        adapter_macs: Callable[[SparsePlan | None], int] | None = None,
    ) -> None:
        self._sites, self._vae, self._tokens = layers.sites, layers.vae, layers.tokens
        self._steps, self._batch, self._device = steps, batch, device
        self._captured, self._adapter_macs = captured, adapter_macs
        self._num_levels = num_levels(layers.sites)
        self.sizes = tuple(height * width for height, width in layers.grids)

    def rows(self, grid: BoolGrid, growth: Sequence[int]) -> tuple[int, ...]:
        """Active rows of every level at the widest growth of a sparse step."""
        return self._rows(grid, max((cells for cells in growth if cells < DENSE_STEP), default=DENSE_STEP))

    def dense_step(self) -> int:
        """MACs of a dense step, projecting the text included."""
        text = text_macs(self._sites, self._batch, self._tokens)
        return self._step(self.sizes) + text + self._guided(None)

    def branch(self) -> int:
        """MACs of one branch of a dense step, projecting the text and adapters apart."""
        return self._step(self.sizes) // self._batch

    def sparse_step(self, grid: BoolGrid, growth: int) -> int:
        """MACs of a sparse step, or of a dense one among them; the text was projected before."""
        return (
            self._sparse(dilate(grid, growth)) if growth < DENSE_STEP else self._step(self.sizes) + self._guided(None)
        )

    def check(self, grid: BoolGrid, growth: int, cells: BoolGrid) -> int:
        """MACs that computing other cells [h, w] besides adds to a sparse step."""
        if growth == DENSE_STEP:
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
            grid: booleans [h, w], the mask.
            start: the first step to run.
            plain: no dense steps in between; nor are there any with adapters or captured graphs.
        """
        least, *wider = (spread(*pair, self._steps) for pair in GROWTHS)
        if not (plain or self._adapter_macs or self._captured):
            wider.append(mixed(self._steps, start))
        allowed = FREE * self._time(grid, least[start:])
        affordable = (g for g in reversed(wider) if self._time(grid, g[start:]) <= allowed)
        fits = (g for g in affordable if not self.dense_is_cheaper(grid, g))
        return next(fits, least)

    def _time(self, grid: BoolGrid, growth: Sequence[int]) -> float:
        """Of a sparse run's steps, in multiply-accumulates."""
        return fixed(self._device) * len(growth) + self._sparse_steps(grid, growth)

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

    def _rows(self, grid: BoolGrid, growth: int) -> tuple[int, ...]:
        return count_active_rows(dilate(grid, growth), self._num_levels)

    def _step(self, rows: Sequence[int]) -> int:
        return unet_macs(self._sites, rows, self.sizes, self._batch, self._tokens)

    def _sparse(self, cells: BoolGrid) -> int:
        """MACs of a step that computes these cells [h, w]."""
        plan = make_plan(cells, self._num_levels) if self._adapter_macs else None
        return self._step(count_active_rows(cells, self._num_levels)) + self._guided(plan)

    def _guided(self, plan: SparsePlan | None) -> int:
        """MACs of a step's adapters, dense without a plan."""
        return self._batch * self._adapter_macs(plan) if self._adapter_macs else 0

    def _decode(self, areas: Areas) -> int:
        return decoder_macs(self._vae, areas, self.sizes[0])
