"""Loaded reference adapters, reference pictures, and what the former read of the latter, once for all steps.

The reference pass is that of HelloMeme (arXiv 2410.22901): the same UNet reads the picture's clean latents at t = 0,
and zeros for the branch without a prompt. It reads no words, so that a prompt may change. Knows a pipeline; no history.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import PIL.Image
import torch
from torch import Tensor

from fisedit.adapters.block_convs import output_conv
from fisedit.adapters.checkpoints import check_fit, identity
from fisedit.adapters.cost import dense_macs, reference_macs, sparse_macs
from fisedit.adapters.insertion_points import record_maps
from fisedit.adapters.sparse_row_column import is_recorded, sites
from fisedit.errors import AdapterError, InputError
from fisedit.models.injection import exclusive
from fisedit.models.vae import encode
from fisedit.sparse.cost_model import text_macs, unet_macs
from fisedit.storage.canvas import to_canvas, to_editable
from fisedit.storage.session_reader import SessionAssets
from fisedit.values import LATENT_FACTOR, AdapterReference, check_scale

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from PIL.Image import Image

    from fisedit.adapters.base import Gain, Grids
    from fisedit.adapters.row_column import ReferenceKeys, RowColumnAdapter, RowColumnBlock
    from fisedit.sparse.executor import Executor, ExtraSite
    from fisedit.sparse.feature_cache import CachedFeatures
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import GenerationConfig

_KEPT = 4
"""References whose keys and values stay in memory, the last ones used."""


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """A loaded adapter.

    Args:
        adapter: its blocks.
        source: where it came from.
        scale: of new pictures.
    """

    adapter: RowColumnAdapter
    source: str
    scale: float


@dataclass(frozen=True, eq=False)
class ReferenceCondition:
    """A reference adapter at work on one reference (see `base.UNetAdapter`).

    Args:
        adapter: its blocks.
        reference: the reference's keys and values by insertion point, from `RowColumnAdapter.read`; empty where only
            layers or costs are needed.
        scale: factor of the adapter's gains.
        identity: tells the adapter from all others.
    """

    adapter: RowColumnAdapter
    reference: Mapping[str, ReferenceKeys]
    scale: float = 1.0
    identity: str = ""

    def gains(self, batch: int | None) -> dict[str, Gain]:
        """See `base.UNetAdapter.gains`."""
        return {name: self._gain(block.row_column, name, batch) for name, block in self.adapter.blocks.items()}

    def sites(self, unet: UNet2DConditionModel) -> tuple[ExtraSite, ...]:
        """See `base.UNetAdapter.sites`."""
        return sites(unet, self.identity, self.adapter)

    def macs(self, unet: UNet2DConditionModel, grids: Grids, plan: SparsePlan | None, *, recorded: bool) -> int:
        """See `base.UNetAdapter.macs`."""
        if plan is None:
            return dense_macs(self.adapter, unet, grids)
        return sparse_macs(self.adapter, unet, plan, recorded=recorded)

    def _gain(self, block: RowColumnBlock, name: str, batch: int | None) -> Gain:
        reference = self.reference[name] if batch is None else self.reference[name].last(batch)

        def gain(x: Tensor) -> Tensor:
            scaled: Tensor = self.scale * block(x, reference)
            return scaled

        return gain


class References:
    """The reference adapters and pictures of an engine.

    Args:
        pipe: whose UNet and autoencoder read references.
        executor: of its UNet.
    """

    def __init__(self, pipe: StableDiffusionPipeline, executor: Executor) -> None:
        self._pipe, self._executor = pipe, executor
        self.adapters: dict[str, LoadedAdapter] = {}
        self.pictures: dict[str, Image] = {}
        self._read_keys: OrderedDict[tuple[str, str, int, int, int], Mapping[str, ReferenceKeys]] = OrderedDict()

    def load(self, adapter: RowColumnAdapter, source: str, scale: float) -> str:
        """Load an adapter.

        Args:
            adapter: moved to the UNet's device and dtype.
            source: where it came from.
            scale: of new pictures.

        Returns:
            Its identity.

        Raises:
            AdapterError: it is loaded already, or was made for another UNet.
            InputError: a scale out of range.
        """
        scale = check_scale(scale)
        check_fit(adapter, self._pipe.unet)
        name = identity(adapter)
        if name in self.adapters:
            raise AdapterError(f"the adapter {source} is loaded already; change its scale with scale_adapter")
        unet = self._pipe.unet
        self.adapters[name] = LoadedAdapter(match_unet(adapter, unet), source, scale)
        for block in adapter.blocks.values():
            output_conv(block.row_column)  # known before the first edit
        return name

    def loaded(self, source: str) -> bool:
        """Whether an adapter of this source is loaded."""
        return any(loaded.source == source for loaded in self.adapters.values())

    def unload(self, source: str | None) -> None:
        """Unload an adapter.

        Args:
            source: where it came from; None for all.

        Raises:
            AdapterError: no such adapter is loaded.
        """
        for name in self._named(source):
            del self.adapters[name]
        self.forget()

    def set_scale(self, source: str | None, scale: float) -> None:
        """Set an adapter's scale.

        Args:
            source: where it came from; None for all.
            scale: of new pictures.

        Raises:
            AdapterError: no such adapter is loaded.
            InputError: a scale out of range.
        """
        scale = check_scale(scale)
        for name in self._named(source):
            self.adapters[name] = replace(self.adapters[name], scale=scale)

    def _named(self, source: str | None) -> list[str]:
        named = [name for name, loaded in self.adapters.items() if source in (None, loaded.source, name)]
        if not named:
            sources = ", ".join(loaded.source for loaded in self.adapters.values()) or "none"
            raise AdapterError(f"no adapter {source} is loaded; loaded are {sources}")
        return named

    def forget(self) -> None:
        """Drop what was read, for when the model's weights changed."""
        self._read_keys.clear()

    def adapter_references(self, reference: object) -> tuple[AdapterReference, ...]:
        """What a config records of a reference: one entry for every loaded adapter.

        Args:
            reference: a PIL image.

        Raises:
            InputError: the reference is no picture.
            AdapterError: no adapter is loaded.
        """
        if not self.adapters:
            raise AdapterError("a reference needs an adapter that reads it; call load_adapter first")
        if not isinstance(reference, PIL.Image.Image):
            what = type(reference).__name__
            raise InputError(f"reference must be a PIL image, got {what}; open files with PIL.Image.open")
        picture = to_editable(reference)
        picture = to_canvas(picture, picture.size)
        digest = hashlib.sha256(f"{picture.size}".encode() + picture.tobytes()).hexdigest()[:16]
        self.pictures[digest] = picture
        return tuple(AdapterReference(name, loaded.scale, digest) for name, loaded in self.adapters.items())

    def prepare(self, config: GenerationConfig, branches: int) -> int:
        """Read the references of a config that were not read yet.

        Args:
            config: of the picture.
            branches: guidance branches, 1 or 2.

        Returns:
            Multiply-accumulates spent.

        Raises:
            AdapterError: an adapter or a picture is missing.
            InputError: a size that the adapter cannot take.
        """
        return sum(self._read(entry, config, branches) for entry in config.like)

    def used(self, entries: Iterable[AdapterReference]) -> SessionAssets:
        """The adapters and pictures that entries of `GenerationConfig.like` name, if they are here."""
        named = tuple(entries)
        adapters = {name: loaded for name, loaded in self.adapters.items() if any(one.adapter == name for one in named)}
        pictures = {one.reference: self.pictures[one.reference] for one in named if one.reference in self.pictures}
        return SessionAssets({loaded.source: loaded.scale for loaded in adapters.values()}, pictures)

    def conditions(self, config: GenerationConfig, branches: int) -> tuple[ReferenceCondition, ...]:
        """The adapters of a config with what they read of its references; arguments and errors as in `prepare`."""
        self.prepare(config, branches)
        return tuple(
            replace(condition, reference=self._read_keys[_key(one, config, branches)])
            for condition, one in zip(self.unread_conditions(config), config.like, strict=True)
        )

    def unread_conditions(self, config: GenerationConfig) -> tuple[ReferenceCondition, ...]:
        """The adapters of a config without their references, for costs. Raises AdapterError where one is not loaded."""
        return tuple(ReferenceCondition(self._adapter(one), {}, one.scale, one.adapter) for one in config.like)

    def are_recorded(self, config: GenerationConfig, features: CachedFeatures) -> bool:
        """Whether a step's features were recorded with all adapters of a config."""
        return all(is_recorded(one.adapter, features) for one in config.like)

    def _adapter(self, entry: AdapterReference) -> RowColumnAdapter:
        """The adapter that an entry of `GenerationConfig.like` names. Raises AdapterError where it is not loaded."""
        if entry.adapter not in self.adapters:
            raise AdapterError(f"the picture was made with the adapter {entry.adapter}, which is not loaded; load it")
        return self.adapters[entry.adapter].adapter

    def _read(self, entry: AdapterReference, config: GenerationConfig, branches: int) -> int:
        key = _key(entry, config, branches)
        if key in self._read_keys:
            self._read_keys.move_to_end(key)
            return 0
        adapter = self._adapter(entry)
        if entry.reference not in self.pictures:
            raise AdapterError(f"the reference picture {entry.reference} is not here; give it again")
        unet = self._pipe.unet
        with torch.inference_mode():
            inputs = self._inputs(entry, config, branches)
        with torch.inference_mode(), exclusive(unet):
            reference_maps = record_maps(unet, *inputs, tuple(adapter.channels))
            self._read_keys[key] = adapter.read(reference_maps)
        while len(self._read_keys) > max(_KEPT, len(config.like)):
            self._read_keys.popitem(last=False)
        return self._macs(adapter, config, branches)

    def _inputs(self, entry: AdapterReference, config: GenerationConfig, branches: int) -> tuple[Tensor, Tensor]:
        """Latents [B, 4, h, w] and the text of no words [B, T, D]."""
        pipe, picture = self._pipe, self.pictures[entry.reference]
        latents = encode(pipe.vae, to_canvas(picture, (config.width, config.height))).to(pipe.unet.dtype)
        with exclusive(pipe.text_encoder, pipe.tokenizer):
            text = pipe.encode_prompt("", pipe.unet.device, 1, do_classifier_free_guidance=False)[0]
        if branches == 2:
            latents = torch.cat([torch.zeros_like(latents), latents])
        return latents, text.expand(branches, -1, -1)

    def _macs(self, adapter: RowColumnAdapter, config: GenerationConfig, branches: int) -> int:
        """Of the pass up to the last up block, and of reading its maps."""
        last = (f"up_blocks.{len(self._pipe.unet.up_blocks) - 1}.", "conv_norm_out", "conv_out")
        sites = [site for site in self._executor.sites if not site.name.startswith(last)]
        grids = level_grids(config, 1 + max(site.level for site in self._executor.sites))
        sizes, tokens = [height * width for height, width in grids], int(self._pipe.tokenizer.model_max_length)
        unet_pass = unet_macs(sites, sizes, sizes, branches, tokens) + text_macs(sites, branches, tokens)
        return unet_pass + branches * reference_macs(adapter, self._pipe.unet, grids)


def level_grids(config: GenerationConfig, num_levels: int) -> list[tuple[int, int]]:
    """Sizes of a config's maps.

    Args:
        config: of the picture.
        num_levels: of the UNet.

    Returns:
        (height, width) of every level, finest first.
    """
    grids = [(config.height // LATENT_FACTOR, config.width // LATENT_FACTOR)]
    while len(grids) < num_levels:
        height, width = grids[-1]
        grids.append((-(-height // 2), -(-width // 2)))
    return grids


def _key(entry: AdapterReference, config: GenerationConfig, branches: int) -> tuple[str, str, int, int, int]:
    return entry.adapter, entry.reference, config.width, config.height, branches


def match_unet(adapter: RowColumnAdapter, unet: UNet2DConditionModel) -> RowColumnAdapter:
    """Move an adapter to a UNet's device and dtype, its convolutions to channels_last."""
    adapter.to(unet.device, unet.dtype)
    adapter.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    return adapter
