"""Builds the architecture of a model family with random weights, for measurements of speed without a download.

Knows configurations and initial scales; its images are noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fisedit.models.families.family import SD1, Family, assemble
from fisedit.models.families.stable_diffusion_xl import as_model
from fisedit.models.loader import load_tokenizer, quiet_loaders
from fisedit.models.weight_files import read_json

if TYPE_CHECKING:
    from fisedit.machine.model import Model


def random_pipeline(device: torch.device, dtype: torch.dtype, layers_per_block: int = 2, family: Family = SD1) -> Model:
    """The model in channels-last layout, with activations of order one.

    Args:
        device: Torch device.
        dtype: Precision.
        layers_per_block: The number of layers in a block of the UNet; Stable Diffusion has 2.
        family: The family whose configurations are built.
    """
    with quiet_loaders():  # their imports warn too
        import diffusers
        import transformers

        configs = {part: read_json(family.configs / part / "config.json") for part in family.parts}
        configs["unet"] |= {"layers_per_block": layers_per_block}
        parts: dict[str, Any] = {}
        for part, (library, name) in family.parts.items():
            if library == "diffusers":
                with torch.device("meta"):
                    module = getattr(diffusers, name).from_config(configs[part])
                parts[part] = _filled(module, device, dtype)
            else:
                config = transformers.CLIPTextConfig.from_dict(configs[part])
                with _default_dtype(dtype):
                    parts[part] = getattr(transformers, name)(config).eval().to(device)
        parts |= {name: load_tokenizer(family.configs, name) for name in family.tokenizers}
        scheduler = diffusers.DDIMScheduler.from_pretrained(str(family.configs / "scheduler"))
        pipe = assemble(parts | {"scheduler": scheduler})
    pipe.set_progress_bar_config(disable=True)
    return as_model(pipe)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make modules in a dtype, so that large ones are never in memory in float32 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _filled(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    module = module.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    generator = torch.Generator(device).manual_seed(0)
    for name, weights in module.named_parameters():
        if weights.ndim > 1:
            bound = (3 / weights[0].numel()) ** 0.5  # uniform numbers of the same deviation are drawn six times faster
            weights.uniform_(-bound, bound, generator=generator)
        else:
            weights.fill_(name.endswith("weight"))
    return module
