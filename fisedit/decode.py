"""Latents -> picture: a dense decode that remembers its statistics, and a sparse one that decodes only changed boxes.

A box of latents with a halo goes through diffusers' own decoder; GroupNorms use the source's statistics and the middle
attention the source's keys and values outside the box (SIGE, arXiv 2211.02048, froze statistics first). After every
upsampling the halo is trimmed to what the layers ahead can see. Knows autoencoders and boxes, nothing of prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.attention_processor import Attention
from diffusers.models.upsampling import Upsample2D
from PIL import Image
from torch import Tensor, nn

from fisedit.adapters.base import Replacement, injected
from fisedit.sparse_kernels import ops
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from fisedit.values import BoolGrid

HALO = (4, 6, 8, 8)
"""Cells around a box at 1, 2, 4 and 8 cells per latent cell. After the last upsampling, eight pixels see everything."""

FEATHER = 4
"""Pixels over which an edit fades in, inside the mask's rim."""


@dataclass(eq=False)
class DecoderRecord:
    """What a dense decode left behind.

    Args:
        moments: norm's name -> (mean, variance) of every channel's group, float32 [2, C].
        tokens: key or value projection's name -> [1, h * w, C] of the middle attention.
    """

    moments: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)

    @property
    def own_bytes(self) -> int:
        """Bytes held here."""
        return sum(t.nbytes for t in (*self.moments.values(), *self.tokens.values()))


@dataclass(frozen=True)
class Box:
    """A rectangle of cells: rows top..bottom, columns left..right, ends exclusive."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def area(self) -> int:
        """Number of cells."""
        return (self.bottom - self.top) * (self.right - self.left)

    @property
    def slices(self) -> tuple[slice, slice]:
        """To index the last two dimensions with."""
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def scaled(self, factor: int) -> Box:
        """The same rectangle on a grid `factor` times finer."""
        return Box(self.top * factor, self.left * factor, self.bottom * factor, self.right * factor)

    def grown(self, cells: int, height: int, width: int) -> Box:
        """Larger by `cells` on every side, clipped to the grid."""
        top, left = max(0, self.top - cells), max(0, self.left - cells)
        return Box(top, left, min(height, self.bottom + cells), min(width, self.right + cells))

    def within(self, outer: Box) -> Box:
        """This rectangle in the coordinates of `outer`."""
        return Box(self.top - outer.top, self.left - outer.left, self.bottom - outer.top, self.right - outer.left)


def decode(vae: AutoencoderKL, latents: Tensor) -> tuple[Image.Image, DecoderRecord]:
    """Decode densely, exactly as diffusers does, and remember.

    Args:
        latents: [1, 4, h, w], as the sampler left them.

    Returns:
        The picture, 8h x 8w pixels, and what `decode_boxes` needs.
    """
    record = DecoderRecord()
    replacements: list[Replacement] = [(m, partial(_record_norm, record, name, m)) for name, m in _norms(vae)]
    replacements += [(m, partial(_record_tokens, record, name, m)) for name, m in _tokens(vae)]
    with injected(replacements):
        sample = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
    return _picture(sample), record


def decode_boxes(
    vae: AutoencoderKL, latents: Tensor, grid: BoolGrid, record: DecoderRecord, source: Image.Image
) -> Image.Image:
    """Decode what changed and lay it over the source's picture.

    Args:
        latents: [1, 4, h, w]. grid: booleans [h, w], the latent cells that changed.
        record: of a dense decode of the source, or of the picture it was edited from.
        source: 8h x 8w pixels; outside the mask the result has exactly its pixels.

    Returns:
        A picture of the source's size.
    """
    canvas = source.copy()
    for box in boxes(grid):
        crop = _picture(_decode_box(vae, latents, box, record))
        canvas.paste(crop, (box.left * LATENT_FACTOR, box.top * LATENT_FACTOR))
    return composite(source, canvas, grid)


def composite(source: Image.Image, edited: Image.Image, grid: BoolGrid) -> Image.Image:
    """The edited picture inside the mask, the source's bytes outside, fading over `FEATHER` pixels inside the rim.

    Args:
        source, edited: pictures of the same size. grid: booleans [h, w] of latent cells.
    """
    from scipy.ndimage import distance_transform_edt

    inside = np.kron(grid, np.ones((LATENT_FACTOR, LATENT_FACTOR), bool))
    depth = distance_transform_edt(inside) if not inside.all() else np.full(inside.shape, FEATHER)
    alpha = np.clip(depth / (FEATHER + 1), 0, 1)[..., None]
    old, new = (np.asarray(picture.convert("RGB"), np.float32) for picture in (source, edited))
    return Image.fromarray((old + alpha * (new - old)).round().astype(np.uint8))


def boxes(grid: BoolGrid) -> list[Box]:
    """Rectangles of cells that cover the mask, cut where two tight boxes decode faster than one around both.

    Args:
        grid: booleans [h, w]. No cell of the mask is in two boxes; an empty mask has none.
    """
    return _cut(grid, Box(0, 0, *grid.shape)) if grid.any() else []


def _cut(grid: BoolGrid, frame: Box) -> list[Box]:
    box = _tight(grid, frame)
    halves = min(_halves(grid, box), key=lambda pair: sum(_cost(half, grid) for half in pair), default=())
    if not halves or sum(_cost(half, grid) for half in halves) >= _cost(box, grid):
        return [box]
    return [piece for half in halves for piece in _cut(grid, half)]


def _halves(grid: BoolGrid, box: Box) -> Iterator[tuple[Box, Box]]:
    """Every way to cut a box in two along a row or a column, each half drawn tight around its cells."""
    for row in range(box.top + 1, box.bottom):
        above, below = replace(box, bottom=row), replace(box, top=row)
        yield _tight(grid, above), _tight(grid, below)
    for column in range(box.left + 1, box.right):
        left, right = replace(box, right=column), replace(box, left=column)
        yield _tight(grid, left), _tight(grid, right)


def _tight(grid: BoolGrid, box: Box) -> Box:
    """The smallest box around the cells within `box`; of no area where there are none."""
    rows, columns = (np.flatnonzero(grid[box.slices].any(axis)) for axis in (1, 0))
    if not len(rows):
        return replace(box, bottom=box.top, right=box.left)
    top, left = box.top + int(rows[0]), box.left + int(columns[0])
    return Box(top, left, box.top + int(rows[-1]) + 1, box.left + int(columns[-1]) + 1)


def _cost(box: Box, grid: BoolGrid) -> float:
    """Latent cells decoded for a box, averaged over resolutions: each costs a decoder about the same when full."""
    return sum(areas / 4**i for i, areas in enumerate(_areas(box, grid))) / len(HALO) if box.area else 0.0


def _areas(box: Box, grid: BoolGrid) -> tuple[int, ...]:
    height, width = grid.shape
    factors = [(2**i, halo) for i, halo in enumerate(HALO)]
    return tuple(box.scaled(f).grown(halo, f * height, f * width).area for f, halo in factors)


def box_areas(grid: BoolGrid) -> tuple[int, ...]:
    """Cells decoded at each of the decoder's resolutions, coarsest first."""
    areas = [_areas(box, grid) for box in boxes(grid)]
    return tuple(map(sum, zip(*areas, strict=True))) if areas else (0,) * len(HALO)


@dataclass(eq=False)
class _BoxRun:
    """The state of one box's way through the decoder."""

    record: DecoderRecord
    inner: Box
    shape: tuple[int, int]
    outer: Box
    level: int = 0

    def trim(self, sample: Tensor) -> Tensor:
        """Cut a fresh upsampling [1, C, H, W] down to the next level's halo."""
        self.level += 1
        factor = 2**self.level
        there = self.outer.scaled(2)
        self.outer = self.inner.scaled(factor).grown(HALO[self.level], *(factor * n for n in self.shape))
        rows, columns = self.outer.within(there).slices
        return sample[:, :, rows, columns]


def _decode_box(vae: AutoencoderKL, latents: Tensor, box: Box, record: DecoderRecord) -> Tensor:
    """Pixels of the box alone [1, 3, 8H, 8W]."""
    height, width = latents.shape[-2:]
    run = _BoxRun(record, box, (height, width), box.grown(HALO[0], height, width))
    cells = torch.arange(height * width, device=latents.device).view(height, width)[run.outer.slices].flatten()
    replacements: list[Replacement] = [(m, partial(_replay_norm, run, name, m)) for name, m in _norms(vae)]
    replacements += [(m, partial(_replay_tokens, run, name, m, cells)) for name, m in _tokens(vae)]
    replacements += [(m, partial(_replay_upsample, run, m)) for _, m in _upsamplers(vae)]
    rows, columns = run.outer.slices
    with injected(replacements):
        sample = vae.decode(latents[:, :, rows, columns] / vae.config.scaling_factor, return_dict=False)[0]
    rows, columns = box.scaled(LATENT_FACTOR).within(run.outer).slices
    inner: Tensor = sample[:, :, rows, columns]
    return inner


def _record_norm(record: DecoderRecord, name: str, norm: nn.GroupNorm, x: Tensor) -> Tensor:
    out, totals = ops.map_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    mean, square = (totals[0] / (x[0, 0].numel() * (norm.num_channels // norm.num_groups))).unbind(-1)
    moments = torch.stack([mean, square - mean.square()]).float()
    record.moments[name] = moments.repeat_interleave(norm.num_channels // norm.num_groups, 1)
    return out


def _replay_norm(run: _BoxRun, name: str, norm: nn.GroupNorm, x: Tensor) -> Tensor:
    mean, variance = run.record.moments[name]
    return F.batch_norm(x, mean, variance, norm.weight.float(), norm.bias.float(), eps=norm.eps).to(x.dtype)


def _record_tokens(record: DecoderRecord, name: str, linear: nn.Linear, x: Tensor) -> Tensor:
    out = record.tokens[name] = F.linear(x, linear.weight, linear.bias)
    return out


def _replay_tokens(run: _BoxRun, name: str, linear: nn.Linear, cells: Tensor, x: Tensor) -> Tensor:
    return run.record.tokens[name].clone().index_copy_(1, cells, F.linear(x, linear.weight, linear.bias))


def _replay_upsample(run: _BoxRun, module: Upsample2D, *args: Any, **kwargs: Any) -> Tensor:
    return run.trim(Upsample2D.forward(module, *args, **kwargs))


def _norms(vae: AutoencoderKL) -> list[tuple[str, nn.GroupNorm]]:
    return [(name, m) for name, m in vae.decoder.named_modules() if isinstance(m, nn.GroupNorm)]


def _tokens(vae: AutoencoderKL) -> list[tuple[str, nn.Linear]]:
    attentions = [(name, m) for name, m in vae.decoder.named_modules() if isinstance(m, Attention)]
    return [(f"{name}.{part}", getattr(m, part)) for name, m in attentions for part in ("to_k", "to_v")]


def _upsamplers(vae: AutoencoderKL) -> list[tuple[str, Upsample2D]]:
    return [(name, m) for name, m in vae.decoder.named_modules() if isinstance(m, Upsample2D)]


def _picture(sample: Tensor) -> Image.Image:
    picture: Image.Image = VaeImageProcessor().postprocess(sample, output_type="pil")[0]
    return picture
