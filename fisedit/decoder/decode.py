"""Latents to a picture: a dense decode that caches features, and a sparse decode of what changed.

At its two coarse levels the decoder runs on active rows over cached maps, by the UNet's blocks, with exact GroupNorm.
The fine maps are too large to cache: there boxes with a halo go through diffusers' own blocks, cut tighter at the
finest. Their GroupNorms take the statistics of the whole map: the source's sums, kept per latent cell, with the
box's cells exchanged for the new ones. (SIGE, arXiv 2211.02048, freezes the source's; on a first demo model that was
.7 dB worse inside the mask: 34.3 for 35.1, medians of 12 edits.) Knows autoencoders and boxes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from PIL import Image
from torch import Tensor, nn

from fisedit.decoder.norms import cell_sums, norm_part
from fisedit.decoder.tiles import COARSE_LEVELS, Box, boxes, coarse_cells, cut, upsampler_input, with_halo
from fisedit.errors import NumericsError
from fisedit.features.cache import CachedFeatures, FeatureOverlay, StepFeatures
from fisedit.features.sites import decoder_sites
from fisedit.machine.device import advice_on_overflow
from fisedit.machine.malloc import return_freed_memory
from fisedit.machine.stopwatch import span
from fisedit.models.injection import Replacement, injected
from fisedit.sparse.blocks import attention_block, resampler, resnet
from fisedit.sparse.cached_rows import CachedRows
from fisedit.sparse.packed_weights import MergedWeights
from fisedit.sparse.recording import DenseContext, apply_conv, recording_replacements
from fisedit.sparse.row_layout import gather, map_of, rows_of
from fisedit.sparse.row_source import RowSource
from fisedit.sparse_kernels import ops
from fisedit.sparse_kernels.row_plan import SparsePlan, make_row_plan
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from fisedit.values import BoolGrid


LAST_COARSE = f"up_blocks.{COARSE_LEVELS - 1}.upsamplers.0"
"""Site of the upsampler that reads the last coarse map and gives the first fine one."""


@dataclass(frozen=True, eq=False)
class DecoderCache:
    """The state that a decode leaves for sparse decodes over it.

    Args:
        features: the coarse levels' maps and group statistics.
        picture: what was decoded, 8h x 8w pixels.
        sums: fine norm's name -> float32 [groups, 2, h, w], sums and sums of squares over each latent cell's pixels,
            estimated.
        statistics: fine norm's name -> float64 [groups, 2], sums over the whole map, exact for a dense decode.
    """

    features: CachedFeatures
    picture: Image.Image
    sums: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)

    @property
    def own_bytes(self) -> int:
        """Bytes held here, those of the decode under it not counted."""
        width, height = self.picture.size
        tensors = (*self.sums.values(), *self.statistics.values())
        return self.features.own_bytes + sum(t.nbytes for t in tensors) + 3 * width * height


class DecodedBox(NamedTuple):
    """A box of the finest level: in latent cells, in pixels with its halo, and its pixels [1, 3, H, W]."""

    box: Box
    outer: Box
    sample: Tensor


def decode(vae: AutoencoderKL, latents: Tensor) -> tuple[Image.Image, DecoderCache]:
    """Decode densely, as diffusers does but for products that are widened (see `prepacked`), and cache features.

    Args:
        vae: left as it is.
        latents: [1, 4, h, w], as the sampler left them.

    Returns:
        The picture, 8h x 8w pixels, and what `decode_sparse` needs.

    Raises:
        NumericsError: the decoder gave NaN or infinity.
    """
    features, shape = StepFeatures(), (latents.shape[2], latents.shape[3])
    sums: dict[str, Tensor] = {}
    statistics: dict[str, Tensor] = {}
    replacements = recording_replacements(DenseContext(features, {}), decoder_sites(vae.decoder, COARSE_LEVELS))
    replacements += [
        (norm, partial(_record_norm, sums, statistics, shape, name, norm)) for name, norm in fine_norms(vae)
    ]
    replacements += [*_fine_layers(vae), (vae.decoder, partial(_decoded, vae.decoder))]
    if latents.device.type == "cpu":
        return_freed_memory()  # the large maps below do not fit into its gaps
    with injected(vae, replacements):
        sample = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
    picture = _picture(sample)
    return picture, DecoderCache(features, picture, sums, statistics)


def decode_sparse(
    vae: AutoencoderKL, latents: Tensor, grid: BoolGrid, cache: DecoderCache
) -> tuple[Image.Image, DecoderCache]:
    """Decode what changed and set it into the picture that was decoded before.

    Args:
        vae: left as it is.
        latents: [1, 4, h, w].
        grid: booleans [h, w], the latent cells that changed.
        cache: The cache of the source's decode.

    Returns:
        A picture that one pixel beyond the mask's boxes is the source's, as decoded, and the cache of this decode.

    Raises:
        NumericsError: the decoder gave NaN or infinity.
    """
    found = boxes(grid)
    if found == [Box(0, 0, *grid.shape)]:
        return decode(vae, latents)
    return paste(*SparseDecoder(vae, grid.shape).decode(latents, coarse_plan(vae, grid), grid, found, cache))


def paste(decoded: Sequence[DecodedBox], cache: DecoderCache) -> tuple[Image.Image, DecoderCache]:
    """Set decoded boxes into the picture that was decoded before; the host waits for them.

    Args:
        decoded: The boxes that a `SparseDecoder` gave.
        cache: The cache of its decode, with the picture before.

    Returns:
        The picture, and the cache with it.
    """
    edited = np.array(cache.picture)
    pixels = [np.asarray(_picture(each.sample)) for each in decoded]
    for beyond in (1, 0):  # which boundaries are blended by; a box's own pixels count more than a neighbour's
        for each, shown in zip(decoded, pixels, strict=True):
            part = each.box.scaled(LATENT_FACTOR).dilated(beyond).clipped(each.outer)
            edited[part.slices] = shown[part.within(each.outer).slices]
    picture = Image.fromarray(edited)
    return picture, replace(cache, picture=picture)


def coarse_plan(vae: AutoencoderKL, grid: BoolGrid) -> SparsePlan:
    """The active rows of the coarse levels for a mask [h, w]; level 0 is the finest of them."""
    factor = 2 ** (COARSE_LEVELS - 1)
    return make_row_plan(coarse_cells(grid).repeat(factor, 0).repeat(factor, 1), COARSE_LEVELS, vae.device)


def decode_coarse(source: RowSource, vae: AutoencoderKL, rows: Tensor, count: int) -> None:
    """Run the decoder's coarse levels on active rows.

    Args:
        source: where cached rows come from; keeps those of the last coarse map under `LAST_COARSE`.
        vae: left as it is.
        rows: [1, R + G, 4], scaled latents of the coarsest level's active rows, then of its halo.
        count: R.
    """
    with injected(vae, [(vae.decoder, partial(_coarse_blocks, source, vae.decoder, count))]):
        vae.decode(map_of(rows), return_dict=False)


def _coarse_blocks(source: RowSource, decoder: Any, count: int, x: Tensor, *_: Any) -> Tensor:
    """Run the decoder's blocks up to `LAST_COARSE` in place of its own forward."""
    conv, middle, (active, halo) = decoder.conv_in, decoder.mid_block, rows_of(x).tensor_split([count], 1)
    rows = ops.norm_conv3x3(active, halo, source.kernel_map("conv_in"), source.weight(conv), conv.bias)
    rows = resnet(source, "mid_block.resnets.0", middle.resnets[0], rows)
    for i, (attention, block) in enumerate(zip(middle.attentions, middle.resnets[1:], strict=True)):
        if attention is not None:
            rows = attention_block(source, f"mid_block.attentions.{i}", attention, rows)
        rows = resnet(source, f"mid_block.resnets.{i + 1}", block, rows)
    for i, block in enumerate(decoder.up_blocks[:COARSE_LEVELS]):
        for j, resnet_block in enumerate(block.resnets):
            rows = resnet(source, f"up_blocks.{i}.resnets.{j}", resnet_block, rows)
        if i + 1 < COARSE_LEVELS:
            rows = resampler(source, f"up_blocks.{i}.upsamplers.0", block.upsamplers[0], rows)
    source.keep(LAST_COARSE, rows)
    return x


@dataclass(frozen=True, eq=False)
class Window:
    """The part of the upsampled map that one evaluation of a fine level keeps, and the part whose sums it exchanges.

    Args:
        level: a fine one.
        kept: the part of the upsampled map that the level's blocks compute.
        counted: the part of that whose sums are found, which covers whole latent cells.
        cells: int64, flat latent cells of that part, h * w for those whose sums stay.
    """

    level: int
    kept: Box
    counted: Box
    cells: Tensor


class SparseDecoder:
    """Decodes what changed, on rows and in boxes of exact sizes. The host never waits.

    Args:
        vae: left as it is.
        shape: (h, w) of the latents.

    Raises:
        UnsupportedModuleError: see `modules.decoder_sites`.

    Attributes:
        sums: a cache's, of the current decode, [groups, 2, h * w + 1]: the last cell stands for none.
        statistics: a cache's, of the current decode.
    """

    def __init__(self, vae: AutoencoderKL, shape: tuple[int, int]) -> None:
        self.vae, self.frame, self.device = vae, Box(0, 0, *shape), vae.device
        self.sites = {site.name: site for site in decoder_sites(vae.decoder, COARSE_LEVELS)}
        groups = {name: norm.num_groups for name, norm in fine_norms(vae)}
        cells, device = self.frame.area + 1, self.device
        self.sums = {name: torch.zeros(n, 2, cells, device=device) for name, n in groups.items()}
        self.statistics = {name: torch.ones(n, 2, dtype=torch.float64, device=device) for name, n in groups.items()}
        self._window: Window | None = None

    def decode(
        self, latents: Tensor, plan: SparsePlan, grid: BoolGrid, found: Sequence[Box], cache: DecoderCache
    ) -> tuple[list[DecodedBox], DecoderCache]:
        """Decode from latents to the pixels of every box.

        Args:
            latents: [1, 4, h, w].
            plan: the mask's `coarse_plan`.
            grid: booleans [h, w], the mask.
            found: its boxes of the first fine level.
            cache: The cache of the source's decode.

        Returns:
            Boxes for `paste`, and the cache of this decode, still with the source's picture.
        """
        for name, sums in self.sums.items():
            sums[..., :-1].copy_(cache.sums[name].flatten(2))
            self.statistics[name].copy_(cache.statistics[name])
        scaled = latents.to(self.vae.dtype) / self.vae.config.scaling_factor
        with injected(self.vae, self._replacements()):
            with span("decode coarse", leaf=True):
                overlay = self.run_coarse(gather(scaled, plan.levels[-1].read_positions), plan, cache.features)
            finest = plan.levels[0]
            x = overlay.whole(LAST_COARSE, 0).transpose(1, 2).unflatten(2, (finest.height, finest.width))
            input_box = self.frame.scaled(2 ** (COARSE_LEVELS - 1))
            decoded = [done for box in found for done in self._refine(grid, box, COARSE_LEVELS, x, input_box)]
        kept = {name: sums[..., :-1].unflatten(2, self.frame.shape).clone() for name, sums in self.sums.items()}
        statistics = {name: each.clone() for name, each in self.statistics.items()}
        return decoded, DecoderCache(overlay, cache.picture, kept, statistics)

    def _refine(self, grid: BoolGrid, box: Box, level: int, x: Tensor, input_box: Box) -> Iterator[DecodedBox]:
        """A box's way from a level to pixels; the map of the level above, `x` [1, C, H, W], shows `input_box`."""
        outer = self.outer(box, level, input_box)
        with span(f"decode fine {level}", leaf=True):
            x = self.run_fine(box, outer, level, x, input_box)
        if level + 1 == len(self.vae.decoder.up_blocks):
            yield DecodedBox(box, outer, x)
            return
        for piece in cut(grid, box, level + 1):
            yield from self._refine(grid, piece, level + 1, x, outer)

    def run_coarse(self, rows: Tensor, plan: SparsePlan, features: CachedFeatures) -> FeatureOverlay:
        """Run the coarse levels over cached features.

        Args:
            rows: [1, R + G, 4], scaled latents of the coarsest level's active rows, then of its halo.
            plan: the mask's `coarse_plan`.
            features: The features of the source's decode.

        Returns:
            The overlay of what changed, with the last coarse map under `LAST_COARSE`.
        """
        source = CachedRows(self.sites, FeatureOverlay(features, plan), {}, MergedWeights())
        decode_coarse(source, self.vae, rows, plan.levels[-1].rows)
        return source.overlay

    def outer(self, box: Box, level: int, input_box: Box) -> Box:
        """Return the box that is computed for a box.

        Args:
            box: in latent cells.
            level: a fine one.
            input_box: what the map of the level above shows, in its cells.

        Returns:
            In cells of the level.
        """
        return with_halo(box, level, self.frame.shape)

    def run_fine(self, box: Box, outer: Box, level: int, x: Tensor, input_box: Box) -> Tensor:
        """Run a fine level on a part of the map of the level above.

        Args:
            box: in latent cells.
            outer: what is computed for it, in cells of the level.
            level: a fine one.
            x: [1, C, H, W], the map of the level above.
            input_box: what `x` shows, in cells of the level above.

        Returns:
            The map of `outer` [1, C_out, H_out, W_out], pixels at the last level.
        """
        read = upsampler_input(outer).clipped(input_box)
        counted = box.scaled(2**level).within(outer)
        window = Window(level, outer.within(read.scaled(2)), counted, self.cells_of(box, box))
        return self.fine_blocks(window, crop(x, read.within(input_box)))

    def fine_blocks(self, window: Window, x: Tensor) -> Tensor:
        """The upsampler before a fine level and the level's blocks, of a part [1, C, H, W] of the level above."""
        self._window, level, decoder = window, window.level, self.vae.decoder
        upsampled = Upsample2D.forward(decoder.up_blocks[level - 1].upsamplers[0], x)
        x = decoder.up_blocks[level](crop(upsampled, window.kept))
        if level + 1 == len(decoder.up_blocks):
            x = decoder.conv_out(decoder.conv_act(decoder.conv_norm_out(x)))
        return x

    def cells_of(self, box: Box, outer: Box) -> Tensor:
        """Flat latent cells [n] of `outer`, h * w for those outside `box`."""
        ys = torch.arange(outer.top, outer.bottom, device=self.device)[:, None]
        xs = torch.arange(outer.left, outer.right, device=self.device)
        own = (ys >= box.top) & (ys < box.bottom) & (xs >= box.left) & (xs < box.right)
        return (ys * self.frame.right + xs).masked_fill_(~own, self.frame.area).flatten()

    def _replacements(self) -> list[Replacement]:
        """Return what is injected for the fine levels: norms and convs of parts.

        The upsamplers are called by `fine_blocks` itself.
        """
        vae = self.vae
        norms = [(norm, partial(self._norm, name, norm)) for name, norm in fine_norms(vae)]
        upsamplers = [block.upsamplers[0] for block in vae.decoder.up_blocks[COARSE_LEVELS:-1]]
        return [*norms, *((module, lambda x, *_, **__: x) for module in upsamplers), *_fine_layers(vae)]

    def _norm(self, name: str, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        """GroupNorm under the whole map's statistics, with the box's own cells exchanged for the new ones."""
        window, sums, statistics, none = self._window, self.sums[name], self.statistics[name], self.frame.area
        assert window is not None
        height, width = (side // 2**window.level for side in window.counted.shape)
        fresh = cell_sums(x[(..., *window.counted.slices)], norm.num_groups, (height, width)).flatten(2)
        moved = (fresh - sums.index_select(2, window.cells)).masked_fill(window.cells == none, 0)
        statistics += moved.sum(2, dtype=torch.float64)
        sums.index_copy_(2, window.cells, fresh)
        return norm_part(x, norm, statistics, none * 4**window.level)


def crop(x: Tensor, box: Box) -> Tensor:
    """A rectangle of a map [1, C, H, W], channels-last."""
    return x[(..., *box.slices)].contiguous(memory_format=torch.channels_last)


def _decoded(decoder: Any, x: Tensor, *_: Any) -> Tensor:
    """Run a decoder layer by layer as its own forward does, to the bit, and keep no map longer than it is read."""
    x = decoder.mid_block(decoder.conv_in(x))
    for block in decoder.up_blocks:
        is_plain = type(block) is UpDecoderBlock2D
        for layer in (*block.resnets, *(block.upsamplers or ())) if is_plain else (block,):
            x = layer(x, None)
    out: Tensor = decoder.conv_out(decoder.conv_act(decoder.conv_norm_out(x)))
    return out


def _resnet(block: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A decoder's resnet as its own forward is, to the bit, but with its sum in place and no map kept too long."""
    hidden = block.nonlinearity(block.norm1(x))
    hidden = block.conv1(hidden)
    hidden = block.nonlinearity(block.norm2(hidden))
    hidden = block.conv2(hidden)
    out: Tensor = hidden.add_(x if block.conv_shortcut is None else block.conv_shortcut(x))
    return out if block.output_scale_factor == 1 else out / block.output_scale_factor


def _record_norm(
    sums: dict[str, Tensor],
    statistics: dict[str, Tensor],
    shape: tuple[int, int],
    name: str,
    norm: nn.GroupNorm,
    x: Tensor,
) -> Tensor:
    sums[name] = cell_sums(x, norm.num_groups, shape)
    out, found = ops.dense_group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    statistics[name] = found[0]
    return out


def fine_norms(vae: AutoencoderKL) -> list[tuple[str, nn.GroupNorm]]:
    """The norms of the fine levels, by name, in the order the data travels."""
    return [(name, m) for name, m in _fine_modules(vae) if isinstance(m, nn.GroupNorm)]


def _fine_layers(vae: AutoencoderKL) -> list[Replacement]:
    """The convs of the fine levels, that of the upsampler before them included, by `recording.apply_conv`; and resnets
    and activations in place: an activation's input is a norm's output, which nothing else reads."""
    first = vae.decoder.get_submodule(LAST_COARSE).conv
    modules = [m for _, m in _fine_modules(vae)]
    replaced: list[Replacement] = [(m, partial(_resnet, m)) for m in modules if isinstance(m, ResnetBlock2D)]
    replaced += [(m, partial(F.silu, inplace=True)) for m in dict.fromkeys(modules) if isinstance(m, nn.SiLU)]
    return replaced + [(m, partial(apply_conv, m)) for m in (first, *modules) if isinstance(m, nn.Conv2d)]


def _fine_modules(vae: AutoencoderKL) -> list[tuple[str, nn.Module]]:
    """The decoder's modules behind its coarse levels."""
    coarse = ("conv_in", "mid_block.", *(f"up_blocks.{i}." for i in range(COARSE_LEVELS)))
    return [(name, m) for name, m in vae.decoder.named_modules() if not name.startswith(coarse)]


def _picture(sample: Tensor) -> Image.Image:
    if not sample.isfinite().all():
        raise NumericsError(f"the decoder gave NaN or infinity; {advice_on_overflow(sample.dtype)}")
    picture: Image.Image = VaeImageProcessor().postprocess(sample, output_type="pil")[0]
    return picture
