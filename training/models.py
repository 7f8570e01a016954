"""Text encoder, UNet, scheduler and the pipeline that holds them. Knows nothing of training."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from training.config import Denoiser
from training.tokens import LENGTH, build_tokenizer


def build_text_encoder(settings: Denoiser) -> CLIPTextModel:
    """CLIP's text encoder, small, for the scenes' tokenizer."""
    tokenizer = build_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.text_width,
        intermediate_size=4 * settings.text_width,
        projection_dim=settings.text_width,
        num_hidden_layers=settings.text_layers,
        num_attention_heads=settings.text_heads,
        max_position_embeddings=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


@torch.no_grad()
def adopt(model: nn.Module, known: Mapping[str, Tensor]) -> int:
    """Takes over the weights that `model` has in the same shape, and returns how many those are."""
    fit = {
        name: weight
        for name, weight in model.state_dict().items()
        if name in known and known[name].shape == weight.shape
    }
    for name, weight in fit.items():
        weight.copy_(known[name])
    return len(fit)


@torch.no_grad()
def adopt_words(model: CLIPTextModel, folder: Path) -> None:
    """Takes over what a pipeline's text encoder has in the same shape, and the rows of the tokens that both know."""
    known = CLIPTextModel.from_pretrained(folder / "text_encoder").float().state_dict()
    adopt(model, known)
    name = next(name for name in known if name.endswith("token_embedding.weight"))
    rows, old = known[name], CLIPTokenizer.from_pretrained(folder / "tokenizer").get_vocab()
    table = model.get_input_embeddings().weight
    if rows.shape[1] == table.shape[1]:
        for token, row in build_tokenizer().get_vocab().items():
            if token in old:
                table[row] = rows[old[token]]


def build_unet(settings: Denoiser, latent_side: int) -> UNet2DConditionModel:
    """Stable Diffusion 1.5's blocks: cross-attention at every level but the lowest, and in the middle."""
    crossing = len(settings.channels) - 1
    return UNet2DConditionModel(
        sample_size=latent_side,
        down_block_types=("CrossAttnDownBlock2D",) * crossing + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * crossing,
        block_out_channels=settings.channels,
        layers_per_block=settings.layers,
        cross_attention_dim=settings.text_width,
        attention_head_dim=settings.heads,
        norm_num_groups=settings.groups,
    ).to(memory_format=torch.channels_last)


def build_scheduler(prediction: str) -> DDIMScheduler:
    """Stable Diffusion's noise schedule."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type=prediction,
    )


def build_pipeline(
    vae: AutoencoderKL, text_encoder: CLIPTextModel, unet: UNet2DConditionModel, prediction: str
) -> StableDiffusionPipeline:
    """The parts as one Stable Diffusion pipeline, without safety checker."""
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=build_tokenizer(),
        unet=unet,
        scheduler=build_scheduler(prediction),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def export(pipeline: StableDiffusionPipeline, folder: Path) -> None:
    """Writes the pipeline as 16-bit safetensors, and gives it back in 32 bit.

    The text encoder's configuration is made to name 32 bit: transformers would otherwise compute in the stored
    type, which no CPU does at speed, while diffusers' models already load in 32 bit.
    """
    pipeline.to(torch.float16).save_pretrained(folder, safe_serialization=True)
    pipeline.to(torch.float32)
    for path in folder.glob("*/config.json"):
        settings = json.loads(path.read_text()) | ({"dtype": "float32"} if path.parent.name == "text_encoder" else {})
        settings.pop("_name_or_path", None)  # a path of this machine
        path.write_text(json.dumps(settings, indent=2) + "\n")
