"""The regions that the arguments of an edit and of opening a picture mean.

Knows regions; runs no edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fisedit.errors import InputError, as_text
from fisedit.masking.mask_options import MaskOptions
from fisedit.masking.region import Region
from fisedit.masking.region_values import RegionCanvas
from fisedit.values import LATENT_FACTOR, MAX_REGIONS, EditMask, cell_pixels

if TYPE_CHECKING:
    from fisedit.masking.region_values import Points
    from fisedit.values import BoolGrid, Box


class _UnopenedPicture:
    """The scope of a region on a picture that no model has seen."""

    def __init__(self, cells: tuple[int, int]) -> None:
        self.cells = cells

    def by_words(self, options: MaskOptions) -> tuple[EditMask, str]:
        raise InputError("words attend to a picture once it is opened; open it by a mask or a box, or as a whole")

    def by_points(self, inside: Points, outside: Points) -> BoolGrid:
        raise InputError("points pick things of a picture once it is opened; open it by a mask or a box, or as a whole")


def cells_on_picture(region: Region, size: tuple[int, int]) -> BoolGrid:
    """Return the cells that a region marks before a picture is opened: booleans [height / 8, width / 8], rounded up.

    Args:
        region: without words.
        size: width and height of the picture in pixels.

    Raises:
        MaskError: it does not fit the picture. InputError: no region, or one by words.
    """
    if not isinstance(region, Region):
        raise InputError(f"region must be a Region, got {type(region).__name__}; use Region.mask or Region.box")
    width, height = (-(-side // LATENT_FACTOR) * LATENT_FACTOR for side in size)
    canvas = RegionCanvas(height, width, size)
    return region.bind(canvas).resolve(_UnopenedPicture(canvas.cells)).mask.grid


def covers(crop: Box, region: Region, size: tuple[int, int]) -> bool:
    """Return whether all that a region without words marks lies on a part of a picture.

    Args:
        crop: the part.
        region: A region of masks and boxes.
        size: width and height of the picture in pixels.
    """
    marked = cell_pixels(cells_on_picture(region, size), size)
    left, top, right, bottom = crop
    marked[top:bottom, left:right] = False
    return not marked.any()


def joined(regions: Sequence[tuple[Region, str]], region: Region | None) -> Region:
    """All of several regions with prompts, checked.

    Args:
        regions: with their prompts.
        region: another one, which must be None.

    Raises:
        InputError: something else, or more than 16.
    """
    if region is not None:
        raise InputError("give region or regions, got both; regions have prompts of their own")
    is_pairs = isinstance(regions, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], Region) for pair in regions
    )
    if not is_pairs or len(regions) > MAX_REGIONS:
        raise InputError(f"regions must be 1 to {MAX_REGIONS} pairs of a Region and a prompt, got {as_text(regions)}")
    return Region.union(each for each, _ in regions)


def region_of(region: Region | None, mask: object, protect: object, grow: int, options: MaskOptions) -> Region:
    """The region that the arguments of an edit mean.

    Args:
        region: given as a whole, or None.
        mask: where to edit, or None for where words say.
        protect: where never to edit, or None.
        grow: latent cells by which it is dilated, -64 to 64.
        options: how words are localized.

    Raises:
        InputError: a region beside what it is built from, or a mask beside how words are localized.
    """
    if region is None and mask is not None:
        if options != MaskOptions():
            raise InputError(
                "give a mask, or words, instance, mask_method and probe_steps, got both; "
                "join them as Region.mask(...) & Region.words(...)"
            )
        found = Region.mask(mask)
    elif region is None:
        instance, method, probe_steps = options.instance, options.method, options.probe_steps
        found = Region.words(*options.words, instance=instance, method=method, probe_steps=probe_steps)
    elif not isinstance(region, Region):
        raise InputError(f"region must be a Region, got {type(region).__name__}; use Region.mask or Region.words")
    elif mask is not None or options != MaskOptions():
        raise InputError("give a region, or a mask and words, got both; join them as Region.mask(...) | Region.words()")
    else:
        found = region
    found = found.grow(grow)
    return found if protect is None else found - Region.mask(protect)
