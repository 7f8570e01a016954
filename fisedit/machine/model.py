"""A model as the engine reads it: the parts that every text-to-image pipeline with a UNet has.

diffusers' pipelines are such models as they are. Only what loads, converts or measures a pipeline names its class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fisedit.prompts.embeddings import TextModel

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel


class Model(TextModel, Protocol):
    """A diffusers pipeline, or what has its parts; another pipeline class needs these and nothing else."""

    unet: UNet2DConditionModel
    """Predicts from latents [B, 4, h, w], or [B, 9, h, w] of an inpainting one."""
    vae: AutoencoderKL
    """Encodes pictures, and decodes latents."""
    scheduler: Any
    """The model's own; its config has betas, prediction type and spacing, and samplers of edits are made from it."""

    @property
    def device(self) -> torch.device:
        """The device of the parts."""

    @property
    def components(self) -> dict[str, Any]:
        """The parts by name."""

    def encode_prompt(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Embeddings [B, T, D] of the prompt and of the negative one, or None, as diffusers' pipelines return them."""

    def get_guidance_scale_embedding(self, *args: Any, **kwargs: Any) -> Any:
        """Embeddings [B, C] of a guidance scale, which distilled models read."""

    def get_list_adapters(self) -> dict[str, list[str]]:
        """Names of the LoRAs of every part."""

    def set_adapters(self, names: Any, weights: Any) -> None:
        """Scale LoRAs by name, and switch off others."""

    def delete_adapters(self, names: Any) -> None:
        """Take LoRAs out."""

    def unload_lora_weights(self) -> None:
        """Take all LoRAs out."""

    def load_textual_inversion(self, *args: Any, **kwargs: Any) -> None:
        """Add words to the tokenizer and the text encoder."""

    def unload_textual_inversion(self, *args: Any, **kwargs: Any) -> None:
        """Take added words out."""

    def enable_attention_slicing(self, slice_size: Any = ...) -> None:
        """Compute attention in slices, in less memory."""

    def disable_attention_slicing(self) -> None:
        """Compute attention in one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate densely, as the pipeline does."""
