"""Random IP-Adapters in the layout of their files, an image encoder, and pipelines of diffusers with them in."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from tests.support.pipelines import assembled

if TYPE_CHECKING:
    from pathlib import Path

    from diffusers import UNet2DConditionModel

SIDE, WIDTH, PROJECTED, HIDDEN, DEPTH = 32, 48, 24, 64, 4


def image_encoder(projected: int = PROJECTED) -> CLIPVisionModelWithProjection:
    """Random, small."""
    torch.manual_seed(5)
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        projection_dim=projected,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=8,
    )
    return CLIPVisionModelWithProjection(config).eval().requires_grad_(False)


def tensors(
    unet: UNet2DConditionModel, kind: str, seed: int = 0, projected: int = PROJECTED
) -> dict[str, dict[str, Tensor]]:
    """An adapter's tensors, as diffusers takes them: {"image_proj": ..., "ip_adapter": ...}.

    Args:
        kind: "plain" or "plus".
        projected: the image encoder's width, which a plain one reads.
    """
    make = torch.Generator().manual_seed(seed)
    text = unet.config.cross_attention_dim

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make) / shape[-1] ** 0.5

    if kind == "plain":
        projection = {
            "proj.weight": drawn(4 * text, projected),
            "proj.bias": drawn(4 * text),
            "norm.weight": 1 + drawn(text),
            "norm.bias": drawn(text),
        }
    else:
        projection = {
            "latents": drawn(1, 6, HIDDEN),
            "proj_in.weight": drawn(HIDDEN, WIDTH),
            "proj_in.bias": drawn(HIDDEN),
            "proj_out.weight": drawn(text, HIDDEN),
            "proj_out.bias": drawn(text),
            "norm_out.weight": 1 + drawn(text),
            "norm_out.bias": drawn(text),
        }
        for i in range(DEPTH):
            norms = {f"layers.{i}.0.norm{n}.{part}": drawn(HIDDEN) for n in (1, 2) for part in ("weight", "bias")}
            projection |= norms | {
                f"layers.{i}.0.to_q.weight": drawn(64, HIDDEN),
                f"layers.{i}.0.to_kv.weight": drawn(128, HIDDEN),
                f"layers.{i}.0.to_out.weight": drawn(HIDDEN, 64),
                f"layers.{i}.1.0.weight": 1 + drawn(HIDDEN),
                f"layers.{i}.1.0.bias": drawn(HIDDEN),
                f"layers.{i}.1.1.weight": drawn(4 * HIDDEN, HIDDEN),
                f"layers.{i}.1.3.weight": drawn(HIDDEN, 4 * HIDDEN),
            }
    attending, number = {}, 1
    for name in unet.attn_processors:
        if name.endswith("attn2.processor"):
            channels = unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
            attending[f"{number}.to_k_ip.weight"] = 2 * drawn(channels, text)
            attending[f"{number}.to_v_ip.weight"] = 2 * drawn(channels, text)
            number += 2
    return {"image_proj": projection, "ip_adapter": attending}


def save(adapter: dict[str, dict[str, Tensor]], folder: Path, name: str = "ip-adapter.safetensors") -> Path:
    """Write the file, and the image encoder beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = {f"{part}.{key}": tensor.contiguous() for part, own in adapter.items() for key, tensor in own.items()}
    save_file(flat, folder / name)
    if not (folder / "image_encoder").is_dir():
        image_encoder().save_pretrained(folder / "image_encoder")
    return folder / name


def with_adapters(
    pipe: StableDiffusionPipeline, adapters: list[dict[str, dict[str, Tensor]]], scales: list[float]
) -> StableDiffusionPipeline:
    """diffusers' pipeline over a copy of the UNet, with adapters in it."""
    size = {"shortest_edge": SIDE}
    own = assembled(
        pipe,
        unet=deepcopy(pipe.unet),
        image_encoder=image_encoder(),
        feature_extractor=CLIPImageProcessor(size=size, crop_size={"height": SIDE, "width": SIDE}),
    )
    own.load_ip_adapter(
        [deepcopy(adapter) for adapter in adapters],
        subfolder=[""] * len(adapters),
        weight_name=[""] * len(adapters),
        image_encoder_folder=None,
    )
    own.set_ip_adapter_scale(scales)
    return own
