"""Adapters at work: which changes a UNet's places get, from several adapters at once, each with its scale.

Every adapter (arXiv 2410.22901) reads the map as it was, and what they find is added up: their order does not matter.
Knows tensors and places; neither files nor pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fisedit.adapters import sparse_row_column
from fisedit.adapters.insertion_points import Change, insertion, places
from fisedit.errors import AdapterError
from fisedit.models.injection import Injection

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.adapters.row_column import Knit, Known, RowColumnAdapter
    from fisedit.sparse.executor import ExtraSite


@dataclass(frozen=True, eq=False)
class Guide:
    """An adapter and what it read of one reference.

    Args:
        adapter: its blocks. known: place -> the reference's keys and values, from `RowColumnAdapter.read`.
        scale: what its gain is multiplied by. identity: tells the adapter from every other.
    """

    adapter: RowColumnAdapter
    known: Mapping[str, Known]
    scale: float = 1.0
    identity: str = ""


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Adapters as the layers that an executor adds to a UNet (see `sparse.executor.ExtraLayers`).

    Args:
        guides: the adapters, each with what it read of a reference.
    """

    guides: Sequence[Guide]

    def sites(self, unet: UNet2DConditionModel) -> tuple[ExtraSite, ...]:
        """The blocks of all adapters. Raises AdapterError where one has no sparse form."""
        return sparse_row_column.sites(unet, [(guide.identity, guide.adapter) for guide in self.guides])

    def injection(self, unet: UNet2DConditionModel, batch: int | None = None) -> Injection:
        """See `guided`."""
        return guided(unet, self.guides, batch=batch)


def check_fit(adapter: RowColumnAdapter, unet: UNet2DConditionModel) -> None:
    """Check that an adapter was made for a UNet of this shape.

    Raises:
        AdapterError: names the first place where it was not.
    """
    found = places(unet)
    wanted = adapter.family.places(len(unet.up_blocks))
    if set(wanted) != set(adapter.channels):
        ups = sum(name.startswith("up_") for name in adapter.channels) + adapter.family.first_up
        raise AdapterError(
            f"the adapter must be for a UNet of {len(unet.up_blocks)} levels, got one for {ups}; "
            "load the model that it was trained for, or a derivative"
        )
    for name, channels in adapter.channels.items():
        if found[name].channels != channels:
            raise AdapterError(
                f"the adapter must have {found[name].channels} channels at {name}, got {channels}; "
                "load the model that it was trained for, or a derivative"
            )
    width, there = text_width(adapter), unet.config.cross_attention_dim
    if width not in (None, there):
        raise AdapterError(
            f"the adapter is for a model that reads text of width {width}, got {there}; "
            "load the model that it was trained for, or a derivative (Stable Diffusion 1.x has 768)"
        )


def text_width(adapter: RowColumnAdapter) -> int | None:
    """The width of the text that an adapter's base reads: as it says, or SD 1.x's for its channels, or unknown."""
    told = adapter.config.get("cross_attention_dim")
    return told if isinstance(told, int) else 768 if max(adapter.channels.values()) == 1280 else None


def changes(guides: Sequence[Guide], batch: int | None = None) -> dict[str, Change]:
    """What becomes of the maps of every place.

    Args:
        batch: of the maps; of references for both branches of guidance the last are taken. None: all.
    """
    blocks: dict[str, list[tuple[Knit, Known, float]]] = {}
    for guide in guides:
        for name, block in guide.adapter.blocks.items():
            known = guide.known[name] if batch is None else guide.known[name].last(batch)
            blocks.setdefault(name, []).append((block.knit, known, guide.scale))
    return {name: _change(tuple(parts)) for name, parts in blocks.items()}


def guided(
    unet: UNet2DConditionModel,
    guides: Sequence[Guide],
    controls: Mapping[str, Tensor] | None = None,
    batch: int | None = None,
) -> Injection:
    """What to inject for a UNet to be guided; controls as of `places.insertion`."""
    return insertion(unet, changes(guides, batch), controls)


def _change(parts: tuple[tuple[Knit, Known, float], ...]) -> Change:
    def change(x: Tensor) -> Tensor:
        gains = [scale * knit(x, known) for knit, known, scale in parts]
        changed: Tensor = x + sum(gains[1:], gains[0])
        return changed

    return change
