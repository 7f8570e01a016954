"""One protocol for what changes a UNet's feature maps, and the stack of such adapters in one evaluation.

An adapter names insertion points of a UNet and what it adds to the maps there. It names the layers that compute this,
if a sparse evaluation has to run them at active rows. It also tells what cross-attentions read beside the text,
constant maps that are added in down blocks, and the cost. Every adapter reads the map as it was before any of them. The
gains are added up, so that their order does not matter; but motion modules read the map as the others left it. Adapters
are injected for one evaluation and ejected after it, errors included (see `models.injection`). The engine knows this
protocol alone. LoRAs change a UNet's weights: they stay loaded between evaluations, and are diffusers' own; see `lora`.
Knows tensors and insertion points; neither files nor pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fisedit.adapters.insertion_points import MapChange, inject_maps, insertion_points

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.features.sites import CrossKeys
    from fisedit.models.injection import Injection
    from fisedit.sparse.executor import ExtraSite, SideNetwork, TakeMap
    from fisedit.sparse_kernels.row_plan import SparsePlan

Grids = Sequence[tuple[int, int]]
"""(height, width) of every level, finest first."""

Gain = Callable[[Tensor], Tensor]
"""A map [B, C, H, W] -> what is added to it, of the same shape."""


class UNetAdapter:
    """An adapter at work: its weights, what it read beforehand, and its scale. Each kind has some of these effects."""

    reads_changed = False
    """True if it reads the maps as the other adapters left them."""

    def gains(self, batch: int | None) -> Mapping[str, Gain]:
        """Return what is added to the maps at insertion points, with the scale in it.

        Args:
            batch: The number of items of the maps, B; None for what was read. Items are one for every guidance branch,
                or the last one's alone. For a clip they are those of every frame, branch by branch (see `items_of`).
        """
        return {}

    @property
    def inside_blocks(self) -> bool:
        """Return whether insertion points between the layers of blocks are among those of `gains`."""
        return False

    def see_time(self, embedding: Tensor) -> None:
        """Take the time's embedding [B, E] of an evaluation, before `gains` are called."""

    def cross_keys(self, batch: int) -> Mapping[str, CrossKeys]:
        """Return what cross-attentions read beside the text, by name; argument as in `gains`."""
        return {}

    def controls(self, batch: int) -> Mapping[str, Tensor]:
        """Constant maps [B, C, H, W] that are added at insertion points, and to the skips there, before gains; argument
        as in `gains`."""
        return {}

    @property
    def network(self) -> SideNetwork | None:
        """A network that is evaluated before the UNet, or None."""
        return None

    def intrablock_residuals(self) -> Sequence[tuple[int, Tensor]]:
        """Levels, and maps [1, C, h, w] that are added at the end of every down block; () for none.

        diffusers adds them before a block's map is halved, and behind it where the block has no attention.
        """
        return ()

    def sites(self, unet: UNet2DConditionModel) -> Sequence[ExtraSite]:
        """The layers that `gains` call, and what they record and read.

        Args:
            unet: The UNet that the adapter is for.

        Raises:
            AdapterError: a layer has no sparse form.
        """
        return ()

    def macs(self, unet: UNet2DConditionModel, grids: Grids, plan: SparsePlan | None, *, recorded: bool) -> int:
        """Multiply-accumulates of a step, for one item.

        Args:
            unet: The UNet that the adapter is for.
            grids: The size of the feature map at every level.
            plan: The plan of a sparse step; None for a dense one.
            recorded: the source was made with this adapter, so that a sparse step reads what it recorded.
        """
        return 0


@dataclass(frozen=True, eq=False)
class AdapterStack:
    """Adapters as the layers that an executor adds to a UNet (see `sparse.executor.ExtraLayers`).

    Args:
        adapters: those of one evaluation.
    """

    adapters: Sequence[UNetAdapter]

    @property
    def inside_blocks(self) -> bool:
        """Return whether an adapter changes maps between the layers of blocks."""
        return any(adapter.inside_blocks for adapter in self.adapters)

    def sites(self, unet: UNet2DConditionModel) -> tuple[ExtraSite, ...]:
        """The layers of all adapters; arguments and errors as in `UNetAdapter.sites`."""
        return tuple(site for adapter in self.adapters for site in adapter.sites(unet))

    def injection(self, unet: UNet2DConditionModel, batch: int, take: TakeMap) -> Injection:
        """The context in which the UNet runs with the adapters.

        Args:
            unet: The UNet that the adapters are for.
            batch: The number of items, as in `UNetAdapter.gains`.
            take: The function that takes a map, as in `sparse.executor.ExtraLayers`.
        """
        points, controls = insertion_points(unet), dict[str, Tensor]()
        for adapter in self.adapters:
            for name, added in adapter.controls(batch).items():
                own = take(added, points[name].level)
                controls[name] = controls[name] + own if name in controls else own
        return inject_adapters(unet, self.adapters, controls, batch)

    def cross_keys(self, batch: int) -> dict[str, list[CrossKeys]]:
        """Return what cross-attentions read beside the text, by name; argument as in `UNetAdapter.gains`."""
        found: dict[str, list[CrossKeys]] = {}
        for adapter in self.adapters:
            for name, keys in adapter.cross_keys(batch).items():
                found.setdefault(name, []).append(keys)
        return found

    def networks(self) -> list[SideNetwork]:
        """Networks beside the UNet."""
        return [adapter.network for adapter in self.adapters if adapter.network is not None]

    def residuals(self, take: TakeMap) -> dict[str, list[Tensor]]:
        """Maps that the UNet's forward adds to its own; argument as in `sparse.executor.ExtraLayers`."""
        added = [maps for adapter in self.adapters if (maps := adapter.intrablock_residuals())]
        if not added:
            return {}
        sums = []
        for at_block in zip(*added, strict=True):
            (level, first), *others = at_block
            sums.append(take(sum((each for _, each in others), first), level))
        return {"down_intrablock_additional_residuals": sums}


def map_changes(adapters: Sequence[UNetAdapter], batch: int | None = None) -> dict[str, MapChange]:
    """The changed maps of every insertion point that an adapter names.

    Args:
        adapters: The adapters of one evaluation.
        batch: The number of items, as in `UNetAdapter.gains`.
    """
    gains: dict[str, tuple[list[Gain], list[Gain]]] = {}
    for adapter in adapters:
        for name, gain in adapter.gains(batch).items():
            gains.setdefault(name, ([], []))[adapter.reads_changed].append(gain)
    return {name: _changed_by(*each) for name, each in gains.items()}


def inject_adapters(
    unet: UNet2DConditionModel,
    adapters: Sequence[UNetAdapter],
    controls: Mapping[str, Tensor] | None = None,
    batch: int | None = None,
) -> Injection:
    """Inject adapters into a UNet; leaving the context ejects them.

    Args:
        unet: The UNet that the adapters are for.
        adapters: The adapters of one evaluation.
        controls: The control maps, as in `insertion_points.inject_maps`.
        batch: The number of items, as in `UNetAdapter.gains`.
    """
    watching = [adapter for adapter in adapters if adapter.reads_changed]

    def see_time(embedding: Tensor) -> None:
        for adapter in watching:
            adapter.see_time(embedding)

    return inject_maps(unet, map_changes(adapters, batch), controls, time_hook=see_time if watching else None)


def items_of(read: Tensor, batch: int) -> Tensor:
    """Return what was read for every guidance branch, for the items of a batch (see `UNetAdapter.gains`).

    Args:
        read: [S, ...].
        batch: B.

    Returns:
        [B, ...]; of one item the last branch's, of a clip every branch's once a frame.
    """
    return read[-batch:] if batch <= len(read) else read.repeat_interleave(batch // len(read), 0)


def _changed_by(gains: Sequence[Gain], last: Sequence[Gain]) -> MapChange:
    def change(x: Tensor) -> Tensor:
        if gains:
            first, *others = (gain(x) for gain in gains)
            x = x + sum(others, first)
        for gain in last:
            x = x + gain(x)
        return x

    return change
