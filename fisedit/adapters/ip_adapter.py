"""IP-Adapters (arXiv 2308.06721): cross-attentions read an image's tokens beside the text's.

The files are those that diffusers' `load_ip_adapter` reads, plain, Plus and Full; its modules project what an image
encoder of transformers says of a picture. Keys and values are the same in all steps. Knows tensors and modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import (
    ImageProjection,
    IPAdapterFullImageProjection,
    IPAdapterPlusImageProjection,
)
from torch import Tensor, nn

from fisedit.adapters.base import UNetAdapter, items_of
from fisedit.adapters.picture_adapter import PictureAdapter, counted, identity_of
from fisedit.errors import AdapterError
from fisedit.features.sites import CrossKeys, Role, unet_sites

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.adapters.base import Grids
    from fisedit.adapters.picture_adapter import AdapterInputs
    from fisedit.sparse_kernels.row_plan import SparsePlan
    from fisedit.values import AdapterUse

PROJECTION, ATTENTIONS = "image_proj.", "ip_adapter."
"""Starts of the names of a file's tensors."""

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class IPAdapterCondition(UNetAdapter):
    """An IP-Adapter at work on one picture.

    Args:
        adapter: its weights.
        keys: keys and values [B, T, C] by name of the cross-attention; None where only costs are needed.
        scale: The scale of the output of the attention to the picture.
    """

    adapter: IPAdapter
    keys: Mapping[str, KeyValue] | None
    scale: float

    def cross_keys(self, batch: int) -> dict[str, CrossKeys]:
        """See `UNetAdapter.cross_keys`."""
        assert self.keys is not None, "a picture is read before the adapter is at work"
        return {
            name: CrossKeys(items_of(key, batch), items_of(value, batch), self.scale)
            for name, (key, value) in self.keys.items()
        }

    def macs(self, unet: UNet2DConditionModel, grids: Grids, plan: SparsePlan | None, *, recorded: bool) -> int:
        """See `UNetAdapter.macs`: queries are the text's."""
        rows = [height * width for height, width in grids] if plan is None else [level.rows for level in plan.levels]
        attended = sum(rows[level] * channels for level, channels in self.adapter.places.values())
        return 2 * self.adapter.num_tokens * attended


class IPAdapter(PictureAdapter):
    """A loaded IP-Adapter.

    Args:
        projection: The projection of the encoder's output to tokens, diffusers' own module.
        weights: The weights of keys and values [C, D] each. There is one pair for every cross-attention in the order of
            `UNet2DConditionModel.attn_processors`.
        encoder: a `CLIPVisionModelWithProjection`.
        processor: what the encoder's pictures are prepared by.

    Attributes:
        places: level and channels of every cross-attention, by name; once it is matched with a UNet.
    """

    def __init__(self, projection: nn.Module, weights: Sequence[KeyValue], encoder: Any, processor: Any) -> None:
        super().__init__(_identity(projection, weights, encoder))
        self.projection, self.encoder, self.processor = projection, encoder, processor
        self._weights = list(weights)
        self._by_name: dict[str, KeyValue] = {}
        self.places: dict[str, tuple[int, int]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of one picture, T."""
        if isinstance(self.projection, ImageProjection):
            return int(self.projection.num_image_text_embeds)
        if (latents := getattr(self.projection, "latents", None)) is not None:
            return int(latents.shape[1])
        vision = self.encoder.config
        return int((vision.image_size // vision.patch_size) ** 2 + 1)

    def check_fit(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.check_fit`."""
        names = cross_attention_names(unet)
        if len(names) != len(self._weights):
            raise AdapterError(
                f"the IP-Adapter must have {len(names)} attentions for this model, got {len(self._weights)}; "
                "load one for it (files for SD 1.5 have 16, those for SDXL 70)"
            )
        config, plain = self.encoder.config, isinstance(self.projection, ImageProjection)
        width, read = config.projection_dim if plain else config.hidden_size, _input_width(self.projection)
        if width != read:
            raise AdapterError(
                f"the IP-Adapter's image encoder must give {read} numbers, got one that gives {width}; "
                "name the encoder that it was trained with by image_encoder"
            )
        for name, (key, _) in zip(names, self._weights, strict=True):
            to_k = unet.get_submodule(name).to_k
            expected = to_k.out_features, to_k.in_features
            if key.shape != expected:
                raise AdapterError(
                    f"the IP-Adapter's keys at {name} must be {expected}, got {tuple(key.shape)}; load another"
                )

    def match(self, unet: UNet2DConditionModel) -> None:
        """See `PictureAdapter.match`."""
        names = cross_attention_names(unet)
        self.projection.to(unet.device, unet.dtype)
        self.encoder.to(unet.device, unet.dtype)
        place = unet.device, unet.dtype
        self._weights = [(key.to(*place), value.to(*place)) for key, value in self._weights]
        self._by_name = dict(zip(names, self._weights, strict=True))
        levels = {site.name: site.level for site in unet_sites(unet) if site.role is Role.QUERY}
        self.places = {name: (levels[f"{name}.to_q"], len(key)) for name, (key, _) in self._by_name.items()}

    def read(self, inputs: AdapterInputs) -> tuple[dict[str, KeyValue], int]:
        """See `PictureAdapter.read`."""
        return counted(lambda: self._read(inputs))

    def condition(self, read: Mapping[str, KeyValue] | None, use: AdapterUse, branches: int) -> IPAdapterCondition:
        """See `PictureAdapter.condition`."""
        return IPAdapterCondition(self, read, use.scale)

    def _read(self, inputs: AdapterInputs) -> dict[str, KeyValue]:
        tokens = self.projection(self._encoded(inputs)[-inputs.branches :])
        return {name: (F.linear(tokens, key), F.linear(tokens, value)) for name, (key, value) in self._by_name.items()}

    def _encoded(self, inputs: AdapterInputs) -> Tensor:
        """Return the encoder's output without and with the picture [2, ...], as diffusers' `encode_image` has it."""
        pixels = self.processor(inputs.picture, return_tensors="pt").pixel_values.to(
            self.encoder.device, self.encoder.dtype
        )
        if isinstance(self.projection, ImageProjection):
            seen = self.encoder(pixels).image_embeds
            return torch.cat([torch.zeros_like(seen), seen])
        both = [self.encoder(each, output_hidden_states=True) for each in (torch.zeros_like(pixels), pixels)]
        return torch.cat([each.hidden_states[-2] for each in both])


def _input_width(projection: nn.Module) -> int:
    """The input width of the linear that reads the encoder's output, a projection's first one."""
    return next(module.in_features for module in projection.modules() if isinstance(module, nn.Linear))


def cross_attention_names(unet: UNet2DConditionModel) -> list[str]:
    """Names of a UNet's cross-attentions, in the order of an IP-Adapter's file."""
    return [name.removesuffix(".processor") for name in unet.attn_processors if name.endswith("attn2.processor")]


def build_ip_adapter(tensors: Mapping[str, Tensor], unet: UNet2DConditionModel, encoder: Any) -> IPAdapter:
    """An IP-Adapter from its file's tensors.

    Args:
        tensors: by name.
        unet: A UNet whose class knows diffusers' projections.
        encoder: a `CLIPVisionModelWithProjection`.

    Raises:
        AdapterError: they are of another layout.
    """
    from transformers import CLIPImageProcessor

    projected = {name.removeprefix(PROJECTION): t for name, t in tensors.items() if name.startswith(PROJECTION)}
    attending = {name.removeprefix(ATTENTIONS): t for name, t in tensors.items() if name.startswith(ATTENTIONS)}
    numbers = sorted({int(name.split(".")[0]) for name in attending if name.split(".")[0].isdecimal()})
    try:
        weights = [(attending[f"{n}.to_k_ip.weight"], attending[f"{n}.to_v_ip.weight"]) for n in numbers]
        projection = unet._convert_ip_adapter_image_proj_to_diffusers(projected, low_cpu_mem_usage=False)  # noqa: SLF001
    except (KeyError, RuntimeError, AttributeError, IndexError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise AdapterError(
            f"an IP-Adapter must be plain, Plus or Full for Stable Diffusion, got another ({why:.120})"
        ) from error
    if not isinstance(projection, ImageProjection | IPAdapterPlusImageProjection | IPAdapterFullImageProjection):
        raise AdapterError(
            f"an IP-Adapter must be plain, Plus or Full, got {type(projection).__name__}, which reads no picture"
        )
    read = {f"{ATTENTIONS}{n}.{kind}_ip.weight" for n in numbers for kind in ("to_k", "to_v")}
    if other := next((name for name in tensors if not name.startswith(PROJECTION) and name not in read), None):
        raise AdapterError(f"an IP-Adapter must be plain, Plus or Full, got one with {other}; load another")
    size = encoder.config.image_size
    processor = CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return IPAdapter(projection.eval().requires_grad_(False), weights, encoder, processor)


def _identity(projection: nn.Module, weights: Sequence[KeyValue], encoder: Any) -> str:
    """The identity of the adapter's weights and the encoder's last projection."""
    last = next(reversed(list(encoder.parameters())))
    return identity_of("ip-adapter", (*projection.state_dict().values(), *(t for pair in weights for t in pair), last))
