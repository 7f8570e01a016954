"""The predicted cost of an edit, from layer sites and a mask.

A cost is active rows, multiply-accumulates and seconds, and whether a dense run is cheaper.
MACs are counted from the layers: output rows times weights, plus 2 * queries * keys * width for attention. Norms and
activations count nothing, as in torch's FlopCounterMode. Seconds come from this machine's measured table
(`fisedit.costs.table`). Without one time is counted in multiply-accumulates, by the constants below. That decides
between schedules, and predicts seconds by what the last runs took. Those correct a table as well
(`fisedit.costs.pace`). Runs nothing, and knows neither samplers nor
adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fisedit.costs.macs import decode_work, decoder_macs, text_macs, unet_macs
from fisedit.costs.pace import NO_RUNS, Pace
from fisedit.costs.schedules import (
    DILATION_PAIRS,
    FIRST_SCHEDULE,
    MAX_DENSE_RATIO,
    MAX_TIME_RATIO,
    interleaved_dense_steps,
    two_phase_dilation,
)
from fisedit.costs.table import CostTable
from fisedit.decoder.tiles import Areas, box_areas, frame_areas
from fisedit.features.sites import LayerSite, num_levels
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import count_active_rows, make_row_plan
from fisedit.values import MAX_DILATION, ActiveCells, Dilation, Quality, Shallow, Step, shallow_steps, with_shallow

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL

    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import BoolGrid

LAYER_MACS, WEIGHT_MACS = 9e6, 7
"""The fixed cost of a step on a CPU where there is no table: of every layer, and of every weight that is read.

Both are in multiply-accumulates of the time. On the demo model's 157 layers a step of one cell took 11 ms in fp32 and
12 in bf16. A thousand million more took 12 and 6 (two cores with avx512_bf16). That is 6e6 and 13e6 a layer.
Stable Diffusion's took 50 ms in bf16 on two Zen 5 cores, of which its 860 million weights are the larger part."""

CUDA_MACS = 165e9
"""The fixed cost of a captured step on a GPU, estimated for Stable Diffusion 1.5, as none was measured yet.

The floor of a step at 5 % is 1.3 ms. That is worth 214e9 at a third of an H200's peak of 494e12 a second, and such a
step's own are 50e9. The rest is 1 ms, for reading the weights and for 250 kernels: a larger part of a step than on a
CPU. A shallow step's is counted as large until one was measured, so that shallow steps are not chosen for a guess."""

BREAK_EVEN_SECONDS = 0.95
"""Share of a dense run's predicted seconds from which an edit runs dense, which is exact and costs hardly more."""

BREAK_EVEN_MACS = 0.78
"""Share of a dense step's multiply-accumulates from which an edit runs dense, where there is no table.

Speedups of a sparse step over a dense one were measured in bf16 at 512 px. Two Zen 5 cores gave 1.4 at 66 % in
uneven blobs. They gave 1.2 at 77 % in a square and 1 at 79 % in blobs. Two Xeon cores without AMX gave 1.2 at 78 %, 1.1
at 83 % and 1 at 90 %."""


def fixed_macs(device: torch.device, sites: Sequence[LayerSite]) -> float:
    """The fixed cost of a step, in multiply-accumulates of its time.

    Args:
        device: The device that computes it.
        sites: The sites of the layers that it computes.
    """
    if device.type == "cuda":
        return CUDA_MACS
    return LAYER_MACS * len(sites) + WEIGHT_MACS * sum(site.weights for site in sites)


@dataclass(frozen=True, eq=False)
class CostedLayers:
    """The layers that costs are counted of.

    Args:
        sites: The sites of the UNet.
        vae: The autoencoder whose decoder runs at the end.
        grids: (height, width) of every level, finest first.
        tokens: T.
        shallow: The sites of those layers of the UNet that a shallow step computes.
    """

    sites: tuple[LayerSite, ...]
    vae: AutoencoderKL
    grids: Sequence[tuple[int, int]]
    tokens: int
    shallow: tuple[LayerSite, ...]


class Costs:
    """Costs of a run's steps and decode.

    Args:
        layers: The layers of the UNet and the decoder.
        steps: N.
        batch: B, the branches of one evaluation.
        device: where it runs.
        captured: whether sparse steps run by captured graphs.
        adapter_macs: a sparse step's plan, or None for a dense step -> multiply-accumulates of one branch of its
            adapters; None where there are none.
        table: what this machine takes, measured; None where it was not.
        pace: What the last runs took, over what `work` was predicted.
    """

    def __init__(
        self,
        layers: CostedLayers,
        steps: int,
        batch: int,
        device: torch.device,
        captured: bool = False,
        adapter_macs: Callable[[SparsePlan | None], int] | None = None,
        table: CostTable | None = None,
        pace: Pace = NO_RUNS,
    ) -> None:
        self._sites, self._vae, self._tokens = layers.sites, layers.vae, layers.tokens
        self._steps, self._batch, self._device = steps, batch, device
        self._captured, self._adapter_macs, self._shallow = captured, adapter_macs, layers.shallow
        self._num_levels, self._table, self._pace = num_levels(layers.sites), table, pace
        self.sizes = tuple(height * width for height, width in layers.grids)

    def rows(self, grid: BoolGrid, dilation: Sequence[Dilation]) -> tuple[int, ...]:
        """Active rows of every level at the widest dilation of a sparse step."""
        return self._rows(grid, max((cells for cells in dilation if isinstance(cells, int)), default=MAX_DILATION))

    def dense_step(self) -> int:
        """MACs of a dense step, projecting the text included."""
        text = text_macs(self._sites, self._batch, self._tokens)
        return self._step(self.sizes) + text + self._guided(None)

    def text(self) -> int:
        """MACs of a prompt's keys and values."""
        return text_macs(self._sites, self._batch, self._tokens)

    def branch(self) -> int:
        """MACs of one branch of a dense step without projecting the text and without adapters."""
        return self._step(self.sizes) // self._batch

    def sparse_step(self, grid: BoolGrid, dilation: Dilation) -> int:
        """MACs of a sparse step, or of a dense one among them; the text was projected before.

        Args:
            grid: booleans [h, w], the mask.
            dilation: latent cells computed beyond it, or `Step.DENSE`.
        """
        return (
            self._sparse(dilate(grid, dilation), shallow=isinstance(dilation, Shallow))
            if isinstance(dilation, int)
            else self._step(self.sizes) + self._guided(None)
        )

    def check_macs(self, grid: BoolGrid, dilation: Dilation, cells: BoolGrid) -> int:
        """MACs that a check adds to a sparse step.

        Args:
            grid: booleans [h, w], the mask.
            dilation: latent cells computed beyond it, or `Step.DENSE`.
            cells: booleans [h, w], the cells that are computed for the check.
        """
        if not isinstance(dilation, int):
            return 0
        return self._sparse(dilate(grid, dilation) | cells) - self.sparse_step(grid, dilation)

    def dense(self, start: int = 0) -> int:
        """MACs of a dense run: every step from `start` on, and the decode."""
        steps = self._steps - start
        return steps * self.dense_step() + self._decode(frame_areas(self.sizes[0]))

    def sparse(
        self,
        mask: BoolGrid | ActiveCells,
        dilation: Sequence[Dilation],
        start: int = 0,
        decoded_cells: BoolGrid | None = None,
    ) -> int:
        """MACs of a sparse run over a mask.

        Args:
            mask: booleans [h, w], or its cells by step.
            dilation: latent cells computed beyond it at every step.
            start: the first step to run.
            decoded_cells: booleans [h, w]; None for the mask's.
        """
        cells = _by_step(mask)
        run = sum(
            count * self.sparse_step(cells.at(i), dilation[i]) for i, count in steps_alike(cells, dilation, start)
        )
        return run + self.text() + self._decode(box_areas(cells.grid if decoded_cells is None else decoded_cells))

    def choose_dilations(
        self,
        mask: BoolGrid | ActiveCells,
        start: int = 0,
        *,
        quality: Quality = Quality.BALANCED,
        plain: bool = False,
        shallow: Collection[int] = (),
    ) -> tuple[Dilation, ...]:
        """Choose the dilation of every step.

        The schedules weighed take at most `MAX_TIME_RATIO` of the time of the first one that has the quality. Of these,
        the one nearest to a dense run is taken.

        Args:
            mask: booleans [h, w], or its cells by step.
            start: the first step to run.
            quality: how near the edit must come.
            plain: no dense and no shallow steps; nor are there any with adapters, nor dense ones with captured graphs.
            shallow: steps that may be shallow; dense ones are never in one schedule with them. With captured graphs
                they are where they save what `MAX_TIME_RATIO` allows to spend, and not where the edit must be close.
        """
        cells, is_plain = _by_step(mask), plain or self._adapter_macs is not None
        plain_pairs = [two_phase_dilation(*pair, self._steps) for pair in DILATION_PAIRS]
        may_be_shallow = not self._captured or (
            quality is not Quality.CLOSE
            and self._saves_time(cells, plain_pairs[FIRST_SCHEDULE[quality]], shallow, start)
        )
        if is_plain or not may_be_shallow:
            shallow = ()
        schedules = [with_shallow(pair, shallow) for pair in plain_pairs]
        if not is_plain and not self._captured:
            schedules.append(interleaved_dense_steps(self._steps, start))
        least, *nearer = schedules[FIRST_SCHEDULE[quality] :]
        no_shallow = [*plain_pairs, least][FIRST_SCHEDULE[quality]]
        ratio = MAX_DENSE_RATIO if quality is Quality.BALANCED else MAX_TIME_RATIO
        allowed, allowed_dense = (
            MAX_TIME_RATIO * self._time(cells, least, start),
            ratio * self._time(cells, no_shallow, start),
        )
        within_time = (
            d
            for d in reversed(nearer)
            if self._time(cells, d, start) <= (allowed_dense if Step.DENSE in d else allowed)
        )
        fits = (d for d in within_time if not self.dense_is_cheaper(mask, d, start))
        return next(fits, least)

    def _saves_time(
        self, cells: ActiveCells, dilation: Sequence[Dilation], shallow: Collection[int], start: int
    ) -> bool:
        """Return whether shallow steps make a schedule faster than another may be slower."""
        allowed = MAX_TIME_RATIO * self._time(cells, with_shallow(dilation, shallow), start)
        return self._time(cells, dilation, start) > allowed

    def seconds(
        self,
        mask: BoolGrid | ActiveCells | None,
        dilation: Sequence[Dilation],
        start: int = 0,
        probes: int = 0,
        decoded_cells: BoolGrid | None = None,
    ) -> float | None:
        """Predicted seconds of a whole edit, from prompt to picture, but for reading references.

        Args:
            mask: booleans [h, w], or its cells by step; None for a source or a dense run.
            dilation: latent cells computed beyond it at every step; () for a dense run.
            start: the first step to run.
            probes: dense evaluations that find the mask.
            decoded_cells: booleans [h, w]; None for the mask's.

        Returns:
            Seconds; None where this machine was not measured and nothing was run.
        """
        ratio = self._pace.of(sparse=bool(dilation))
        if ratio is None and self._table is None:
            return None
        return (1.0 if ratio is None else ratio) * self.work(mask, dilation, start, probes, decoded_cells)

    def work(
        self,
        mask: BoolGrid | ActiveCells | None,
        dilation: Sequence[Dilation],
        start: int = 0,
        probes: int = 0,
        decoded_cells: BoolGrid | None = None,
    ) -> float:
        """Seconds of a whole edit by the table, or multiply-accumulates of its time without one; see `seconds`."""
        table, steps = self._table, self._steps - start
        cells = None if mask is None or not dilation else _by_step(mask)
        run = (probes + (0 if dilation else steps)) * self._dense_time()
        decoded = None
        if cells is not None:
            run += self._time(cells, dilation, start)
            decoded = cells.grid if decoded_cells is None else decoded_cells
        if table is None:
            areas = frame_areas(self.sizes[0]) if decoded is None else box_areas(decoded)
            return run + self.text() + self._decode(areas)
        fixed_work = {"text": 1.0, "once": 1.0}
        if cells is not None:
            fixed_work |= {"plan": 1.0, "setup": float(self.rows(cells.grid, dilation)[0])}
        run += steps * table.sum("edit", {"loop": float(self.sizes[0])})
        return run + table.sum("edit", fixed_work) + self._decode_seconds(table, decoded)

    def step_seconds(self, grid: BoolGrid, dilation: Sequence[Dilation]) -> float:
        """Predicted seconds of a sparse step at its widest dilation; 0 where this machine was not measured."""
        widest = max((cells for cells in dilation if isinstance(cells, int)), default=0)
        return 0.0 if self._table is None else self._step_time(grid, widest, shifted=False)

    def _decode_seconds(self, table: CostTable, grid: BoolGrid | None) -> float:
        """Return the time of a decode: of the mask's boxes, or of the whole picture without one."""
        frame = frame_areas(self.sizes[0])
        areas = frame if grid is None else box_areas(grid)
        if areas != frame and table.keys_of("decode sparse"):
            return table.sum("decode sparse", decode_work(areas))
        kinds = (*(f"decode {i}" for i in range(len(frame))), "decode")
        whole = table.sum("decode dense", dict.fromkeys(kinds, float(self.sizes[0])))
        return whole * min(1.0, areas[-1][1] / frame[-1][1])

    def _time(self, cells: ActiveCells, dilation: Sequence[Dilation], start: int) -> float:
        """Return the time of a sparse run's steps, in seconds, or in multiply-accumulates without a table."""
        first = next((i for i in range(start, len(dilation)) if dilation[i] is Step.DENSE), len(dilation))
        return sum(
            count * self._step_time(cells.at(i), dilation[i], shifted=i > first)
            for i, count in steps_alike(cells, dilation, start, first)
        )

    def _step_time(self, grid: BoolGrid, dilation: Dilation, *, shifted: bool) -> float:
        """Return the time of one step, in seconds, or in multiply-accumulates without a table.

        The step is `shifted` behind a dense one.
        """
        table = self._table
        if not isinstance(dilation, int):
            return self._dense_time() + (table.sum("edit", {"shift": float(self.sizes[0])}) if table else 0.0)
        if table is None:
            sites = self._shallow if isinstance(dilation, Shallow) else self._sites
            return fixed_macs(self._device, sites) + self.sparse_step(grid, dilation)
        rows = self._rows(grid, dilation)
        plan = make_row_plan(dilate(grid, dilation), self._num_levels) if self._adapter_macs else None
        seconds = table.step("shifted" if shifted else "sparse", rows, self.sizes, self._batch)
        if isinstance(dilation, Shallow):
            return seconds * max(self._shallow_macs(rows) / self._step(rows), len(self._shallow) / len(self._sites))
        return seconds * (1 + self._guided(plan) / self._step(rows))

    def _dense_time(self) -> float:
        macs = self._step(self.sizes)
        if self._table is None:
            return fixed_macs(self._device, self._sites) + macs + self._guided(None)
        return self._table.step("dense", self.sizes, self.sizes, self._batch) * (1 + self._guided(None) / macs)

    def dense_is_cheaper(self, mask: BoolGrid | ActiveCells, dilation: Sequence[Dilation], start: int = 0) -> str:
        """Return the reason why a mask is too large to be worth a sparse run, or "".

        Args:
            mask: booleans [h, w], or its cells by step.
            dilation: latent cells computed beyond it at every step.
            start: the first step to run, unless the mask's first cells join later; those before are not weighed.
        """
        cells = _by_step(mask)
        start = max(start, cells.start)
        widest = max((d for d in dilation[start:] if isinstance(d, int)), default=MAX_DILATION)
        if cells.grid.all() and cells.entry is None:
            return "the mask covers everything"
        as_wide = with_shallow([widest] * len(dilation), shallow_steps(dilation))
        groups = steps_alike(cells, as_wide, start)
        rows = [(self._rows(cells.at(i), widest), as_wide[i], count) for i, count in groups]
        work = sum(n * (self._shallow_macs if isinstance(d, Shallow) else self._step)(r) for r, d, n in rows)
        share, limit, what = work / (len(dilation) - start) / self._step(self.sizes), BREAK_EVEN_MACS, "arithmetic"
        if self._table is not None:
            is_untried = share <= limit and not self._pace.is_sure  # the table may be of a busy hour
            seconds = self._pace.correction * self.work(mask, dilation, start) / self.work(None, (), start)
            share, limit, what = 0.0 if is_untried else seconds, BREAK_EVEN_SECONDS, "seconds"
        return f"the region alone takes {share:.0%} of the {what} of making it anew" if share > limit else ""

    def _rows(self, grid: BoolGrid, dilation: int) -> tuple[int, ...]:
        return count_active_rows(dilate(grid, dilation), self._num_levels)

    def _step(self, rows: Sequence[int]) -> int:
        return unet_macs(self._sites, rows, self.sizes, self._batch, self._tokens)

    def _shallow_macs(self, rows: Sequence[int]) -> int:
        return unet_macs(self._shallow, rows, self.sizes, self._batch, self._tokens)

    def _sparse(self, cells: BoolGrid, *, shallow: bool = False) -> int:
        """MACs of a step that computes these cells [h, w]."""
        if shallow:
            return self._shallow_macs(count_active_rows(cells, self._num_levels))
        plan = make_row_plan(cells, self._num_levels) if self._adapter_macs else None
        return self._step(count_active_rows(cells, self._num_levels)) + self._guided(plan)

    def _guided(self, plan: SparsePlan | None) -> int:
        """MACs of a step's adapters, dense without a plan."""
        return self._batch * self._adapter_macs(plan) if self._adapter_macs else 0

    def _decode(self, areas: Areas) -> int:
        return decoder_macs(self._vae, areas, self.sizes[0])


def _by_step(mask: BoolGrid | ActiveCells) -> ActiveCells:
    return mask if isinstance(mask, ActiveCells) else ActiveCells(mask)


def steps_alike(
    cells: ActiveCells, dilation: Sequence[Dilation], start: int, first_dense: int | None = None
) -> list[tuple[int, int]]:
    """One of the steps that compute the same cells, and how many there are, of every kind.

    Args:
        cells: The active cells of the edit, by step.
        dilation: latent cells computed beyond them at every step.
        start: the first step to run.
        first_dense: those behind this one are kinds of their own; None where that does not matter.
    """
    kinds: dict[object, list[int]] = {}
    for i in range(start, len(dilation)):
        is_behind = first_dense is not None and i > first_dense
        kinds.setdefault((dilation[i], type(dilation[i]), cells.stage(i), is_behind), []).append(i)
    return [(steps[0], len(steps)) for steps in kinds.values()]
