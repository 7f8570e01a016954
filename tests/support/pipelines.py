"""Tiny random Stable Diffusion pipelines, built in memory from a seed. Knows diffusers and nothing of fisedit.

Default initialisation leaves a network half dead: zero biases, unit norms, attention so flat that any bug in it
averages away. So every parameter is redrawn, and one forward pass scales each conv and linear to a chosen spread.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMInverseScheduler,
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    SchedulerMixin,
    StableDiffusionDiffEditPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    TCDScheduler,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = (
    *("a", "an", "the", "and", "on", "in", "of", "with", "no", "cat", "dog", "bird", "cake", "house", "tree", "car"),
    *("beach", "night", "snow", "red", "blue", "big"),
)
"""Words that are one token each; any other word is spelled, letter by letter or by a shared beginning."""

PROMPTS = ("a cat and a cake on a beach", "a dog and a cake on a beach", "the red house in snow", "")

KARRAS, SDE, TRAILING = (
    {"use_karras_sigmas": True},
    {"algorithm_type": "sde-dpmsolver++"},
    {"timestep_spacing": "trailing"},
)
SINGLE = SDE | {"lower_order_final": True}

SCHEDULERS = ("ddim", "dpmsolver++", "euler", "euler_a", "lcm")
"""One of each kind: tests of everything run these."""

ALL_SCHEDULERS: Mapping[str, tuple[type[SchedulerMixin], dict]] = MappingProxyType(
    {
        "ddim": (DDIMScheduler, {}),
        "ddim_trailing": (DDIMScheduler, TRAILING),
        "dpmsolver++": (DPMSolverMultistepScheduler, {}),
        "dpmsolver++_karras": (DPMSolverMultistepScheduler, KARRAS),
        "dpmsolver++_sde": (DPMSolverMultistepScheduler, SDE),
        "dpmsolver++_sde_karras": (DPMSolverMultistepScheduler, SDE | KARRAS),
        "dpmsolver++_sde_exponential": (DPMSolverMultistepScheduler, SDE | {"use_exponential_sigmas": True}),
        "dpm_sde": (DPMSolverSinglestepScheduler, SINGLE),
        "dpm_sde_karras": (DPMSolverSinglestepScheduler, SINGLE | KARRAS),
        "euler": (EulerDiscreteScheduler, {}),
        "euler_trailing": (EulerDiscreteScheduler, TRAILING),
        "euler_a": (EulerAncestralDiscreteScheduler, {}),
        "heun": (HeunDiscreteScheduler, {}),
        "pndm": (PNDMScheduler, {"skip_prk_steps": True}),
        "unipc": (UniPCMultistepScheduler, {}),
        "lcm": (LCMScheduler, {}),
        "tcd": (TCDScheduler, {}),
    }
)
"""Name -> diffusers' class and what its config has instead of the model's."""


@dataclass(frozen=True)
class UNetShape:
    """What sets one UNet apart from another. `attention` says which levels have it, finest first; `heads` follows
    diffusers' `attention_head_dim`, which in SD's UNet counts heads, not their width."""

    channels: tuple[int, ...]
    attention: tuple[bool, ...]
    layers: int
    heads: int | tuple[int, ...]
    groups: int
    text_dim: int
    linear_projection: bool = False
    prediction: str = "epsilon"
    sample_size: int = 16
    depth: int | tuple[int, ...] | tuple[tuple[int, ...], ...] = 1
    pooled: int = 0
    middle: str | None = "UNetMidBlock2DCrossAttn"
    reverse_depth: tuple[tuple[int, ...], ...] | None = None

    @property
    def down_blocks(self) -> tuple[str, ...]:
        return tuple("CrossAttnDownBlock2D" if here else "DownBlock2D" for here in self.attention)

    @property
    def up_blocks(self) -> tuple[str, ...]:
        return tuple("CrossAttnUpBlock2D" if here else "UpBlock2D" for here in reversed(self.attention))


SHAPES: Mapping[str, UNetShape] = MappingProxyType(
    {
        "sd15": UNetShape((16, 32, 48, 64), (True, True, True, False), layers=2, heads=8, groups=8, text_dim=32),
        "sd2": UNetShape(
            (16, 32, 48, 64),
            (True, True, True, False),
            layers=2,
            heads=(2, 4, 6, 8),
            groups=4,
            text_dim=24,
            linear_projection=True,
            prediction="v_prediction",
        ),
        "shallow": UNetShape((24, 32, 64), (False, True, True), layers=1, heads=4, groups=8, text_dim=16),
        "demo": UNetShape((16, 32, 48), (True, True, True), layers=2, heads=4, groups=4, text_dim=32),
        "sdxl": UNetShape(
            (16, 32, 48),
            (False, True, True),
            layers=2,
            heads=(2, 4, 6),
            groups=4,
            text_dim=24 + 32,
            linear_projection=True,
            depth=(1, 1, 3),
            pooled=20,
        ),
    }
)


DISTILLED: Mapping[str, UNetShape] = MappingProxyType(
    {
        "BK-SDM-Base": replace(SHAPES["sd15"], layers=1),
        "BK-SDM-Small": replace(SHAPES["sd15"], layers=1, middle=None),
        "BK-SDM-Tiny": replace(
            SHAPES["sd15"], channels=(16, 32, 48), attention=(True, True, True), layers=1, middle=None
        ),
        "SSD-1B": replace(
            SHAPES["sdxl"],
            depth=((1, 1), (2, 2), (1, 2)),
            reverse_depth=((1, 2, 3), (2, 1, 1), (1, 1, 1)),
            middle="UNetMidBlock2D",
        ),
    }
)
"""Shapes whose blocks are fewer than their family's."""


def build_pipeline(name: str, seed: int = 0, layers: int = 2) -> StableDiffusionPipeline:
    """Build the random fp32 pipeline `name` of `SHAPES`, the same one for the same seed; safe to modify.

    Args:
        name: of `SHAPES` or `DISTILLED`.
        seed: of the weights.
        layers: of the text encoders.

    Raises:
        KeyError: `name` is in none of them.
    """
    shape = {**SHAPES, **DISTILLED}[name]
    with torch.inference_mode(mode=False), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if shape.pooled:
            return _build_xl(shape, layers)
        tokenizer = build_tokenizer()
        text_encoder = _build_text_encoder(tokenizer, shape.text_dim, layers)
        pipe = StableDiffusionPipeline(
            vae=_build_vae(),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            unet=_build_unet(shape, _encode(text_encoder, tokenizer, PROMPTS)),
            scheduler=build_scheduler("ddim", shape.prediction),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _build_xl(shape: UNetShape, layers: int) -> StableDiffusionXLPipeline:
    """Build Stable Diffusion XL in small: two text encoders, the second with pooled embeddings and other padding."""
    tokenizers = build_tokenizer(), build_tokenizer(pad_token="!")
    encoders = (
        _build_text_encoder(tokenizers[0], 24, layers),
        _build_text_encoder(tokenizers[1], shape.text_dim - 24, layers, shape.pooled),
    )
    pipe = StableDiffusionXLPipeline(
        vae=_build_vae(),
        text_encoder=encoders[0],
        text_encoder_2=encoders[1],
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        unet=UNet2DConditionModel(
            **_unet_config(shape),
            transformer_layers_per_block=shape.depth,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + shape.pooled,
        ).eval(),
        scheduler=build_scheduler("ddim", shape.prediction),
        add_watermarker=False,
    )
    text, _, pooled, _ = pipe.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False)
    sizes = torch.tensor([[128, 128, 0, 0, 128, 128]] * len(PROMPTS)).float()
    _enliven_unet(pipe.unet, text, {"text_embeds": pooled, "time_ids": sizes})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build_scheduler(name: str = "ddim", prediction: str = "epsilon") -> SchedulerMixin:
    """Build the scheduler `name` of `ALL_SCHEDULERS` with Stable Diffusion's noise schedule."""
    base = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type=prediction,
    )
    kind, changes = ALL_SCHEDULERS[name]
    return kind.from_config(base.config, **changes)


def with_scheduler(pipe: StableDiffusionPipeline, name: str) -> StableDiffusionPipeline:
    """Wrap `pipe`'s own modules in a new pipeline that samples with scheduler `name`; `pipe` keeps its scheduler."""
    scheduler = build_scheduler(name, pipe.scheduler.config.prediction_type)
    return assembled(pipe, scheduler=scheduler)


def assembled(pipe: DiffusionPipeline, kind: type[DiffusionPipeline] | None = None, **parts: object) -> Any:
    """Make a pipeline of another class, or of the same one, of `pipe`'s own modules and others."""
    kind = kind or type(pipe)
    options = {"add_watermarker": False, "requires_safety_checker": False}
    options = {name: value for name, value in options.items() if name in signature(kind).parameters}
    made = kind(**(pipe.components | parts), **options)
    made.set_progress_bar_config(disable=True)
    return made


@lru_cache
def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """CLIP's layout in small: the bytes' symbols, the same at a word's end, merged words, start and end of text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(code) for code in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens, merges = symbols + [symbol + "</w>" for symbol in symbols], []
    for word in WORDS:
        pieces = [*word[:-1], word[-1] + "</w>"]
        left = pieces[0]
        for right in pieces[1:]:
            if (left, right) not in merges:
                merges.append((left, right))
                tokens.append(left + right)
            left += right
    return {token: index for index, token in enumerate([*tokens, START, END])}, merges


def build_tokenizer(**options: str) -> CLIPTokenizer:
    """Build a byte-level CLIP tokenizer that knows `WORDS` as single tokens and pads with the end token."""
    vocab, merges = _vocabulary()
    return CLIPTokenizer(vocab=dict(vocab), merges=list(merges), model_max_length=77, **options)


def _encode(text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer, prompts: tuple[str, ...]) -> Tensor:
    """Embed `prompts` as the pipeline does: [len(prompts), 77, text_dim]."""
    ids = tokenizer(list(prompts), padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    return text_encoder(ids)[0]


def _build_text_encoder(tokenizer: CLIPTokenizer, width: int, layers: int, pooled: int = 0) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        projection_dim=pooled,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = (CLIPTextModelWithProjection if pooled else CLIPTextModel)(config).eval()
    _enliven(model, lambda: _encode(model, tokenizer, PROMPTS))
    return model


def _build_unet(shape: UNetShape, text: Tensor) -> UNet2DConditionModel:
    model = UNet2DConditionModel(**_unet_config(shape)).eval()
    _enliven_unet(model, text)
    return model


def _unet_config(shape: UNetShape) -> dict[str, object]:
    return {
        "sample_size": shape.sample_size,
        "block_out_channels": shape.channels,
        "down_block_types": shape.down_blocks,
        "up_block_types": shape.up_blocks,
        "mid_block_type": shape.middle,
        "reverse_transformer_layers_per_block": shape.reverse_depth,
        "layers_per_block": shape.layers,
        "attention_head_dim": shape.heads,
        "norm_num_groups": shape.groups,
        "cross_attention_dim": shape.text_dim,
        "use_linear_projection": shape.linear_projection,
    }


def _enliven_unet(model: UNet2DConditionModel, text: Tensor, added: dict[str, Tensor] | None = None) -> None:
    latents = torch.randn(len(text), 4, 16, 16)
    timesteps = torch.linspace(50, 950, len(text)).long()
    _enliven(model, lambda: model(latents, timesteps, text, added_cond_kwargs=added))


def _build_vae() -> AutoencoderKL:
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=128,
        scaling_factor=0.5,  # not SD's own, so that code which takes it for granted fails
    ).eval()
    image = torch.rand(1, 3, 128, 128) * 2 - 1
    _enliven(model, lambda: model(image))
    return model


def _enliven(model: nn.Module, run: Callable[[], object]) -> None:
    """Redraw every parameter, then let one forward pass `run` scale each conv and linear to a useful output spread."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            nn.init.normal_(parameter)
            if isinstance(module, nn.GroupNorm | nn.LayerNorm):
                parameter.mul_(0.3).add_(1.0 if name == "weight" else 0.0)
    with _calibrating(model):
        run()


@contextmanager
def _calibrating(model: nn.Module) -> Iterator[None]:
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    hooks = [layer.register_forward_hook(_scaler(_spread(name))) for name, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _spread(name: str) -> float:
    """Output spread of layer `name`: wide queries and keys, so that attention picks; narrow images, so few clip."""
    if name.endswith(("to_q", "to_k", "q_proj", "k_proj")):
        return 1.5
    return 0.4 if name == "decoder.conv_out" else 1.0


def _scaler(spread: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    def scale(layer: nn.Module, _: object, output: Tensor) -> Tensor:
        factor = spread / output.std()
        for parameter in layer.parameters(recurse=False):
            parameter.mul_(factor)
        return output * factor

    return scale


def diffedit(pipe):
    parts = pipe.components | {"inverse_scheduler": DDIMInverseScheduler.from_config(pipe.scheduler.config)}
    del parts["image_encoder"]
    made = StableDiffusionDiffEditPipeline(**parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made
