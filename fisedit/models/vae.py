"""Encodes images to latents, and shows latents as preview images while a sampler runs.

Knows autoencoders; knows nothing of the UNet, prompts or edits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from fisedit.machine.device import write_count
from fisedit.models import group_norm
from fisedit.models.injection import exclusive, injected
from fisedit.models.validation import INPAINTING_CHANNELS
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from diffusers import AutoencoderTiny, UNet2DConditionModel

    from fisedit.machine.model import Model
    from fisedit.values import BoolGrid

MAX_DEVIATION = 1.2
"""Standard deviation of latents in previews at most; scaling factors give those of pictures about 1.

With guidance the first estimate has 3 to 4 on the demo model: two thirds of its preview were black or white."""

_fits: WeakKeyDictionary[AutoencoderKL, tuple[object, Tensor]] = WeakKeyDictionary()
"""Maps from latents to colours, with the device and the weights that they were fitted with."""


@torch.inference_mode()
def encode(vae: AutoencoderKL, image: Image.Image) -> Tensor:
    """Encode an image: the mode of the encoder's distribution.

    Args:
        vae: The autoencoder.
        image: The image in any mode, 8w x 8h pixels.

    Returns:
        Latents [1, C, h, w] times the scaling factor, in the autoencoder's dtype.
    """
    pixels = VaeImageProcessor().preprocess(image.convert("RGB")).to(vae.device, vae.dtype)
    with _exact(vae):
        latents: Tensor = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
    return latents


def _exact(vae: AutoencoderKL) -> AbstractContextManager[None]:
    """Use an autoencoder alone, with norms that hold for flat pictures."""
    return injected(vae, [(norm, partial(group_norm.apply, norm)) for norm in group_norm.plain_norms(vae)])


def is_inpainting(unet: UNet2DConditionModel) -> bool:
    """Return whether a UNet reads a mask and the latents of a masked picture after its own latents."""
    return bool(unet.config.in_channels == INPAINTING_CHANNELS)


@torch.inference_mode()
def inpaint_inputs(vae: AutoencoderKL, image: Image.Image | None, mask: BoolGrid) -> Tensor:
    """Return what an inpainting UNet reads after the latents, as in diffusers' StableDiffusionInpaintPipeline.

    Args:
        vae: The autoencoder.
        image: The image in any mode, 8w x 8h pixels; None where the mask has all of it.
        mask: Booleans [h, w], the cells to paint.

    Returns:
        [1, 1 + C, h, w]: the mask, and the latents of the picture that is grey under it, in the autoencoder's dtype.
    """
    cells = torch.tensor(mask)[None, None].to(vae.device, vae.dtype)
    size = mask.shape[1] * LATENT_FACTOR, mask.shape[0] * LATENT_FACTOR
    image = Image.new("RGB", size) if image is None else image.convert("RGB")
    pixels = VaeImageProcessor().preprocess(image).to(vae.device, vae.dtype)
    masked = pixels * (1 - F.interpolate(cells, scale_factor=LATENT_FACTOR))
    with _exact(vae):
        latents = vae.encode(masked).latent_dist.mode() * vae.config.scaling_factor
    return torch.cat([cells, latents], 1)


def preview(pipe: Model, latents: Tensor) -> Image.Image:
    """A quick image of latents: by the preview's autoencoder where the pipeline has one, else one pixel per cell.

    Args:
        pipe: The pipeline.
        latents: [1, C, h, w].

    Returns:
        RGB, 8w x 8h pixels, or w x h.
    """
    tiny, latents = getattr(pipe, "preview_vae", None), _toned_down(latents)
    return _fitted_preview(pipe.vae, latents) if tiny is None else _decoded_preview(tiny, latents)


def _toned_down(latents: Tensor) -> Tensor:
    """Latents with the contrast of a picture's: guidance makes the first estimates several times as strong."""
    return latents * min(1.0, MAX_DEVIATION / max(float(latents.float().std()), 1e-6))


@torch.inference_mode()
def _decoded_preview(tiny: AutoencoderTiny, latents: Tensor) -> Image.Image:
    scaled = latents.to(tiny.device, tiny.dtype) / tiny.config.scaling_factor
    with exclusive(tiny):
        sample = tiny.decode(scaled, return_dict=False)[0]
    picture: Image.Image = VaeImageProcessor().postprocess(sample.float(), output_type="pil")[0]
    return picture


def _fitted_preview(vae: AutoencoderKL, latents: Tensor) -> Image.Image:
    """Draw a preview by a linear map from latents to colours. It is fitted to decoded noise, and anew for other
    weights."""
    fitted_with = vae.device, vae.dtype, sum(map(write_count, vae.parameters()))
    known, fit = _fits.get(vae, (None, None))
    if fit is None or known != fitted_with:
        fit = _fitted(vae)
        _fits[vae] = fitted_with, fit
    colours = _append_ones(latents) @ fit
    pixels = (colours.clamp(0, 1) * 255).round().byte().view(*latents.shape[-2:], 3)
    return Image.fromarray(pixels.cpu().numpy())


@torch.inference_mode()
def _fitted(vae: AutoencoderKL) -> Tensor:
    """The least-squares map [C + 1, 3] from latents to mean colour."""
    coarse = torch.randn(1, vae.config.latent_channels, 8, 16, generator=torch.Generator().manual_seed(0))
    latents = F.interpolate(coarse, scale_factor=2, mode="bilinear").to(vae.device, vae.dtype)
    with exclusive(vae):  # no other thread's forwards
        sample = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
    colours = F.avg_pool2d((sample.float() / 2 + 0.5).clamp(0, 1), LATENT_FACTOR)
    fit: Tensor = torch.linalg.lstsq(_append_ones(latents), colours[0].flatten(1).T).solution
    return fit


def _append_ones(latents: Tensor) -> Tensor:
    """[1, C, h, w] -> float32 [h * w, C + 1], the last column ones."""
    rows = latents[0].float().flatten(1).T
    return F.pad(rows, (0, 1), value=1.0)
