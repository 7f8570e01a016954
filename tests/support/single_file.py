"""Writes a Stable Diffusion pipeline as one file, under the tensor names that such files have had since 2022."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor

Rules = tuple[tuple[str, str], ...]

_RESNET: Rules = (
    (r"\.norm1\.", ".in_layers.0."),
    (r"\.conv1\.", ".in_layers.2."),
    (r"\.norm2\.", ".out_layers.0."),
    (r"\.conv2\.", ".out_layers.3."),
    (r"\.time_emb_proj\.", ".emb_layers.1."),
    (r"\.conv_shortcut\.", ".skip_connection."),
)
_VAE: Rules = (
    (r"(up|down)_blocks\.", r"\1."),
    (r"\.(down|up)samplers\.0\.", r".\1sample."),
    (r"(down|up)\.(\d)\.resnets\.", r"\1.\2.block."),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0", "mid.attn_1"),
    (r"attn_1\.group_norm", "attn_1.norm"),
    (r"attn_1\.to_([qkv])", r"attn_1.\1"),
    (r"attn_1\.to_out\.0", "attn_1.proj_out"),
    (r"conv_shortcut", "nin_shortcut"),
    (r"conv_norm_out", "norm_out"),
)
_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


_OPEN_CLIP: Rules = (
    (r"embeddings\.token_embedding", "token_embedding"),
    (r"embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"final_layer_norm", "ln_final"),
    (r"encoder\.layers", "transformer.resblocks"),
    (r"layer_norm(\d)", r"ln_\1"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
    (r"self_attn\.out_proj", "attn.out_proj"),
)


def save_single_file(pipe: StableDiffusionPipeline, path: Path, *, sd2: bool = False, has_gaps: bool = False) -> Path:
    """Save `pipe` as one safetensors file, its text encoder as 1.x's, 2.x's or XL's.

    With gaps, blocks are numbered as if every level had two layers, as diffusers' own script does it.
    """
    layers = 2 if has_gaps else pipe.unet.config.layers_per_block
    tensors = {f"model.diffusion_model.{unet_name(pipe, n, layers)}": t for n, t in pipe.unet.state_dict().items()}
    for name, tensor in pipe.vae.state_dict().items():
        tensors[f"first_stage_model.{_vae_name(name)}"] = _vae_tensor(name, tensor)
    text = {name.removeprefix("text_model."): tensor for name, tensor in pipe.text_encoder.state_dict().items()}
    if hasattr(pipe, "text_encoder_2"):
        tensors |= {f"conditioner.embedders.0.transformer.text_model.{name}": tensor for name, tensor in text.items()}
        second = {name.removeprefix("text_model."): t for name, t in pipe.text_encoder_2.state_dict().items()}
        tensors["conditioner.embedders.1.model.text_projection"] = second.pop("text_projection.weight").T
        tensors |= {f"conditioner.embedders.1.model.{name}": tensor for name, tensor in _open_clip(second).items()}
        tensors["denoiser.sigmas"] = torch.zeros(1000)
    elif sd2:
        tensors |= {f"cond_stage_model.model.{name}": tensor for name, tensor in _open_clip(text).items()}
    else:
        tensors |= {f"cond_stage_model.transformer.text_model.{name}": tensor for name, tensor in text.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    return path


def _open_clip(text: dict[str, Tensor]) -> dict[str, Tensor]:
    """A text encoder's tensors as OpenCLIP has them: queries, keys and values in one."""
    tensors = {}
    for name, tensor in text.items():
        if match := re.fullmatch(r"(.*)self_attn\.q_proj\.(weight|bias)", name):
            start, kind = match.groups()
            parts = [text[f"{start}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            tensors[_apply(_OPEN_CLIP, f"{start}attn.in_proj_{kind}")] = torch.cat(parts)
        elif not re.search(r"self_attn\.[kv]_proj", name):
            tensors[_apply(_OPEN_CLIP, name)] = tensor
    return tensors


def unet_name(pipe: StableDiffusionPipeline, name: str, layers: int = 2) -> str:
    for start, ldm in _ENDS.items():
        if name.startswith(start + "."):
            return ldm + name.removeprefix(start)
    if match := re.match(r"mid_block\.(resnets|attentions)\.(\d)(.*)", name):
        kind, index, rest = match.groups()
        return f"middle_block.{1 if kind == 'attentions' else 2 * int(index)}{_inside(rest, kind)}"
    side, block, kind, index, rest = re.match(r"(down|up)_blocks\.(\d)\.(\w+)\.(\d)(.*)", name).groups()
    step = layers + 1
    first = step * int(block) + int(index)
    if kind == "downsamplers":
        return f"input_blocks.{step * int(block) + step}.0.op{rest.removeprefix('.conv')}"
    if kind == "upsamplers":
        place = 2 if hasattr(pipe.unet.up_blocks[int(block)], "attentions") else 1
        return f"output_blocks.{step * int(block) + layers}.{place}{rest}"
    home = f"input_blocks.{first + 1}" if side == "down" else f"output_blocks.{first}"
    return f"{home}.{1 if kind == 'attentions' else 0}{_inside(rest, kind)}"


def _inside(rest: str, kind: str) -> str:
    return _apply(_RESNET, rest) if kind == "resnets" else rest


def _vae_name(name: str) -> str:
    name = re.sub(r"up_blocks\.(\d)", lambda match: f"up_blocks.{3 - int(match[1])}", name)
    return _apply(_VAE, name)


def _vae_tensor(name: str, tensor: Tensor) -> Tensor:
    """The attention's linears lie as 1x1 convolutions."""
    linear = re.search(r"attentions\.0\.to_\w+(\.0)?\.weight", name)
    return tensor[:, :, None, None] if linear else tensor


def _apply(rules: Rules, name: str) -> str:
    for pattern, ldm in rules:
        name = re.sub(pattern, ldm, name)
    return name
