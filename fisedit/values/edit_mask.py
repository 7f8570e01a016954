"""The mask of an edit: the latent cells that may change and from which step, and the pixels that cells cover."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from fisedit.values.base import LATENT_FACTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from fisedit.values.base import BoolGrid, Box


class MaskSource(StrEnum):
    """The origin of a mask."""

    GIVEN = "given"
    ATTENTION = "attention"
    EVERYWHERE = "everywhere"
    NOWHERE = "nowhere"


def cell_pixels(grid: BoolGrid, size: tuple[int, int], crop: Box | None = None) -> BoolGrid:
    """The pixels of a picture that a grid of cells covers: those whose centre lies in a cell of the grid.

    Compositing, and every check of what an edit left unchanged, use this function.

    Args:
        grid: Booleans [h, w].
        size: Width and height of the picture in pixels, of any ratio to the grid.
        crop: The part of the picture that the grid lies over; None for all of it.

    Returns:
        Booleans [height, width].
    """
    left, top, right, bottom = crop or (0, 0, *size)
    pixels = np.zeros(size[::-1], bool)
    pixels[top:bottom, left:right] = over_pixels(grid, (right - left, bottom - top))
    return pixels


def over_pixels(cells: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """The value that every pixel has of the cell in which its centre lies.

    Args:
        cells: values [h, w].
        size: width and height in pixels of what the cells cover, of any ratio to them.

    Returns:
        Values [height, width].
    """
    columns, rows = ((2 * np.arange(n) + 1) * m // (2 * n) for n, m in zip(size, cells.shape[::-1], strict=True))
    return cells[np.ix_(rows, columns)]


@dataclass(frozen=True, eq=False)
class ActiveCells:
    """The latent cells that an edit changes, by step: all of a mask at once, or of a soft mask those that have joined.

    Differential Diffusion (arXiv 2306.00950) defines the step at which a cell joins. A cell that may change by a share
    of the steps joins where an edit of that strength would begin. It is the source's until then.

    Args:
        grid: booleans [h, w], the cells that join at any step.
        entry: index of the first step of every cell [h, w], N where it has none; None where all begin together.
    """

    grid: BoolGrid
    entry: NDArray[np.int64] | None = None

    @property
    def start(self) -> int:
        """Index of the first step with a cell."""
        return 0 if self.entry is None else int(self.entry.min())

    def at(self, step: int) -> BoolGrid:
        """The cells that have joined at a step: booleans [h, w]."""
        return self.grid if self.entry is None else self.entry <= step

    def joining(self, step: int, start: int) -> BoolGrid:
        """The cells that join at a step: booleans [h, w]; all of them at `start` where they begin together."""
        return self.grid & (step == start) if self.entry is None else self.entry == step

    def stage(self, step: int) -> int:
        """A number that is equal for steps with the same cells."""
        return 0 if self.entry is None else int((self.entry <= step).sum())


MAX_REGIONS = 16
"""Regions of one edit that may have prompts of their own."""


@dataclass(frozen=True, eq=False)
class RegionalPrompt:
    """Words of their own for a part of an edit's mask.

    Args:
        prompt: text, with weights as in `prompts.weighting`.
        grid: booleans [h, w], the latent cells that attend to it.
    """

    prompt: str
    grid: BoolGrid = field(repr=False)


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A copy in memory that nothing can write to."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def entry_steps(levels: NDArray[np.uint8], steps: int) -> NDArray[np.int64]:
    """Index of the step at which every cell of a soft mask joins, as `first_step` has it for one strength.

    Args:
        levels: uint8 [h, w], 255 for the first step.
        steps: N.

    Returns:
        [h, w], 0 to N; N for cells that never join.
    """
    return steps - (steps * levels.astype(np.int64)) // 255


def soft_levels(levels: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Levels uint8 [h, w] as an `EditMask` has them: None for those of a hard mask, 0 and 255 alone."""
    return None if ((levels == 0) | (levels == 255)).all() else levels


@dataclass(frozen=True, eq=False)
class EditMask:
    """Latent cells whose pixels may change. Its arrays cannot be written to.

    Args:
        grid: booleans [h, w], one per latent cell (8x8 pixels).
        source: where it came from.
        confidence: 0 to 1; the share of regions that were right where attention separated inside from outside as well,
            on the demo model (`masking.masks.confidence`); 1 for a given mask.
        heatmap: the map behind it, floats [h, w] in 0 to 1, or None.
        other_objects: cells [h, w] of things that stay, where words tell, or None.
        levels: The share by which every cell of a soft mask may change, uint8 [h, w]: 255 as much as a hard mask's, 0
            outside `grid`; None for a hard one.
        pixels: how much of every pixel is taken from what the cells paint, uint8 [H, W] of the part of the picture that
            is on the canvas: 255 for all, 0 for none. None where all of every cell is taken.
    """

    grid: BoolGrid = field(repr=False)
    source: MaskSource
    confidence: float = 1.0
    heatmap: NDArray[np.float32] | None = field(default=None, repr=False)
    other_objects: BoolGrid | None = field(default=None, repr=False)
    levels: NDArray[np.uint8] | None = field(default=None, repr=False)
    pixels: NDArray[np.uint8] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Copy the arrays to memory that nothing can write to."""
        for name in ("grid", "heatmap", "other_objects", "levels", "pixels"):
            array = getattr(self, name)
            if array is not None:
                object.__setattr__(self, name, frozen(array))

    @property
    def area(self) -> float:
        """Share of latent cells inside, 0 to 1."""
        return float(self.grid.mean())

    @property
    def raster(self) -> NDArray[Any]:
        """One pixel a cell [h, w], for a file: booleans, or the levels of a soft mask."""
        return self.grid if self.levels is None else self.levels

    def cells(self, steps: int) -> ActiveCells:
        """The cells that an edit of so many steps computes at each of them.

        Args:
            steps: N, 1 or more.
        """
        return ActiveCells(self.grid, None if self.levels is None else entry_steps(self.levels, steps))

    def shares(self, size: tuple[int, int], crop: Box | None = None) -> NDArray[np.uint8]:
        """Return how much of every pixel of a picture is taken from what the cells paint: uint8 [height, width].

        Args:
            size: width and height of the picture in pixels.
            crop: the part of the picture that the mask lies over; None for all of it.
        """
        inside, shares = cell_pixels(self.grid, size, crop), np.full(size[::-1], 255, np.uint8)
        if self.pixels is not None:
            left, top, right, bottom = crop or (0, 0, *size)
            shares[top:bottom, left:right] = self.pixels
        return np.where(inside, shares, np.uint8(0))

    def painted(self, size: tuple[int, int], crop: Box | None = None) -> BoolGrid:
        """The pixels of a picture that may change: booleans [height, width]; arguments as in `shares`."""
        return self.shares(size, crop) > 0

    @property
    def canvas_pixels(self) -> NDArray[np.uint8] | None:
        """`pixels` at canvas size, [8h, 8w]: the mean of those that a pixel of the canvas covers."""
        from PIL import Image as PIL

        height, width = (LATENT_FACTOR * n for n in self.grid.shape)
        if self.pixels is None or self.pixels.shape == (height, width):
            return self.pixels
        return np.asarray(PIL.fromarray(self.pixels).resize((width, height), PIL.Resampling.BOX))

    def with_cells(self, grid: BoolGrid) -> EditMask:
        """This mask over other cells [h, w]; of those that it had not, all pixels are taken."""
        if self.pixels is None:
            return replace(self, grid=grid)
        is_new = over_pixels(grid & ~self.grid, self.pixels.shape[::-1])
        return replace(self, grid=grid, pixels=np.where(is_new, np.uint8(255), self.pixels))

    def image(self) -> Image:
        """The mask at canvas size, [8h, 8w] pixels, mode "L". Cells inside are 255, or a soft mask's levels; cells
        outside are 0. The value is lower where a pixel is taken in part."""
        from PIL import Image as PIL

        levels = self.grid.astype(np.uint8) * 255 if self.levels is None else self.levels
        inside = np.kron(levels, np.ones((LATENT_FACTOR, LATENT_FACTOR), np.uint8))
        if (pixels := self.canvas_pixels) is not None:
            inside = ((inside.astype(np.uint16) * pixels + 254) // 255).astype(np.uint8)  # rounded up
        return PIL.fromarray(inside, mode="L")


def dense_run_as_text(mask: EditMask) -> str:
    """Return what an edit does that runs dense, before the reason why.

    Args:
        mask: mask of the edit.
    """
    if mask.grid.all():
        return "the whole picture is painted"
    return "only the region is painted, but all of the picture is computed"
