"""Families of models that are loaded: their parts, settings of the UNet, and names in single files.

Knows tables alone; loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "configs"
"""The folder with a folder of configurations for every family."""

SIZES = 6
"""Numbers that tell Stable Diffusion XL the sizes of the original, the crop and the target."""

_PARTS: Mapping[str, tuple[str, str]] = {
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "text_encoder": ("transformers", "CLIPTextModel"),
}
_XL_PARTS = {**_PARTS, "text_encoder_2": ("transformers", "CLIPTextModelWithProjection")}
_FILE: Mapping[str, tuple[str, ...]] = {"unet": ("model.diffusion_model.",), "vae": ("first_stage_model.", "vae.")}


@dataclass(frozen=True)
class Family:
    """An architecture, and what its pipelines have in common.

    Args:
        name: The name of the folder with the configurations of its single files.
        title: Its usual name.
        pipelines: diffusers' classes of its folders, the one that generates first.
        parts: Part with weights -> (library, class).
        prefixes: Part -> prefixes of its tensors' names in a single file.
        open_clip: The part whose tensors lie as OpenCLIP's in a single file, or "".
        settings: UNet setting -> values for which the sparse engine is exact, where they are not those of all.
        encoder_layer: The text encoder's layer that is read, counted from the last as ModelSpec does.
        options: Arguments of the pipeline's class.
        told: Those of them that a folder's model_index.json tells.
        latent_scale: The factor of latents behind its autoencoder.
        upcasts_vae: Whether an autoencoder whose configuration says so runs in fp32 where the rest is fp16.
    """

    name: str
    title: str
    pipelines: tuple[str, ...]
    parts: Mapping[str, tuple[str, str]]
    prefixes: Mapping[str, tuple[str, ...]]
    open_clip: str = ""
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    encoder_layer: int = 1
    latent_scale: float = 0.18215
    upcasts_vae: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    told: tuple[str, ...] = ()

    @property
    def configs(self) -> Path:
        """The folder with the configurations of its single files."""
        return CONFIGS / self.name

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """Names of its tokenizers, one for each text encoder."""
        return tuple(part.replace("text_encoder", "tokenizer") for part in self.encoders)

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of its text encoders."""
        return tuple(part for part in self.parts if part.startswith("text_encoder"))

    def is_upcast(self, part: str, config: Mapping[str, Any]) -> bool:
        """Return whether a part runs in fp32 where the rest is fp16, by its configuration."""
        return part == "vae" and self.upcasts_vae and bool(config.get("force_upcast", True))


_SD = ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline")
_UNCHECKED = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
SD1 = Family(
    "sd15",
    "SD 1.5",
    _SD,
    _PARTS,
    {**_FILE, "text_encoder": ("cond_stage_model.transformer.",)},
    options=_UNCHECKED,
)
SD2 = replace(
    SD1,
    name="sd2",
    title="SD 2",
    prefixes={**_FILE, "text_encoder": ("cond_stage_model.model.",)},
    open_clip="text_encoder",
)
SDXL = Family(
    "sdxl",
    "SDXL",
    ("StableDiffusionXLPipeline", "StableDiffusionXLInpaintPipeline", "StableDiffusionXLImg2ImgPipeline"),
    _XL_PARTS,
    {
        **_FILE,
        "text_encoder": ("conditioner.embedders.0.transformer.",),
        "text_encoder_2": ("conditioner.embedders.1.model.",),
    },
    open_clip="text_encoder_2",
    settings={"addition_embed_type": ("text_time",)},
    encoder_layer=2,
    latent_scale=0.13025,
    upcasts_vae=True,
    options={"force_zeros_for_empty_prompt": True, "add_watermarker": False},
    told=("force_zeros_for_empty_prompt",),
)
FAMILIES = (SD1, SD2, SDXL)


def family_of(parts: Mapping[str, Any]) -> Family:
    """Return the family of a model's components.

    Args:
        parts: By name, as `Model.components` has them.
    """
    return max(FAMILIES, key=lambda family: len(family.parts.keys() & parts.keys()))


def text_encoders(parts: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return every text encoder of a model behind its tokenizer.

    Args:
        parts: By name, as `Model.components` has them.
    """
    family = family_of(parts)
    pairs = zip(family.tokenizers, family.encoders, strict=True)
    return [(parts[tokenizer], parts[encoder]) for tokenizer, encoder in pairs]


def assemble(parts: Mapping[str, Any], kind: str | None = None) -> Any:
    """Return a diffusers pipeline of a model's components, as `Model.components` has them.

    Args:
        parts: By name.
        kind: The name of diffusers' class; None for the one that generates.
    """
    import diffusers

    family = family_of(parts)
    return getattr(diffusers, kind or family.pipelines[0])(**{**family.options, **parts})
