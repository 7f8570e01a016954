"""A real picture -> the latents that a sampler would have passed through to make it.

DDIM inversion (arXiv 2010.02502) by diffusers' own inverse scheduler, or the independent noising of edit-friendly DDPM
inversion (arXiv 2304.06140). The path found is kept as the source's latents, so what inversion loses never shows
outside a mask: direct inversion (arXiv 2310.01506) without anything to optimise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from diffusers import DDIMInverseScheduler, DDIMScheduler
from diffusers.utils.torch_utils import randn_tensor

from fisedit.errors import InputError, NumericsError
from fisedit.machine.device import advice_on_overflow
from fisedit.values import SchedulerName

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fisedit.machine.model import Model
    from fisedit.values import GenerationConfig

INVERTIBLE_SPACINGS = ("leading", "trailing")
"""Ways to space timesteps that diffusers can invert."""


@torch.inference_mode()
def invert_ddim(
    pipe: Model,
    config: GenerationConfig,
    latents: Tensor,
    evaluate: Callable[[Tensor, Tensor], Tensor],
    predict: Callable[[int, Tensor], Tensor],
) -> list[Tensor]:
    """DDIM inversion: latents from the clean ones back to noise, without guidance.

    The model is evaluated at the time whose noise the latents have, as a sampler that passes there will, so that one
    evaluation serves both. (diffusers' pipelines evaluate at the time that a step leads to, as no sampler does.)

    Args:
        pipe: the pipeline.
        config: steps and scheduler.
        latents: clean, [1, 4, h, w].
        evaluate: Evaluates the model at a time that no step of the sampler has. It is called with (timestep, latents
            [1, 4, h, w]), and returns the prediction [1, 4, h, w].
        predict: Evaluates the model as the sampler's i-th step will, from the last to the first. It is called with (i,
            latents [1, 4, h, w]), and returns the prediction [1, 4, h, w].

    Returns:
        N + 1 latents, noise first, the given ones last.

    Raises:
        InputError: a scheduler whose path has no inverse here, timesteps whose spacing has none, or a distilled model.
        NumericsError: the model predicted NaN or infinity.
    """
    _check_invertible(pipe, config)
    scheduler = DDIMInverseScheduler.from_config(pipe.scheduler.config)
    steps, spacing = config.num_inference_steps, scheduler.config.timestep_spacing
    if spacing not in INVERTIBLE_SPACINGS:
        supported = f"a model whose timesteps are spaced {' or '.join(INVERTIBLE_SPACINGS)}, got {spacing}"
        raise InputError(f'inversion="ddim" takes {supported}; use inversion="ddpm"')
    scheduler.set_timesteps(steps, device=latents.device)
    previous_timestep = scheduler.timesteps[0] - scheduler.config.num_train_timesteps // steps
    prediction = evaluate(previous_timestep.clamp(min=0), latents)
    path = [latents]
    for i, t in zip(reversed(range(steps)), scheduler.timesteps, strict=True):
        path.insert(0, scheduler.step(prediction, t, path[0]).prev_sample)
        if not path[0].isfinite().all():
            raise NumericsError(
                f"latents turned NaN or infinite at timestep {int(t)}; {advice_on_overflow(path[0].dtype)}"
            )
        prediction = predict(i, path[0])
    return path


@torch.inference_mode()
def noise_latents(pipe: Model, config: GenerationConfig, latents: Tensor) -> list[Tensor]:
    """Clean latents with the noise of every step's time, drawn independently for each.

    Independent noise keeps the picture's structure in the noise that then leads from one to the next. A path that a
    sampler could have taken hides it.

    Args:
        pipe: the pipeline.
        config: steps, scheduler and seed of the noise.
        latents: clean, [1, 4, h, w].

    Returns:
        N + 1 latents, the noisiest first, the given ones last.

    Raises:
        InputError: a scheduler other than DDIM, or a distilled model.
    """
    _check_invertible(pipe, config)
    scheduler, generator = DDIMScheduler.from_config(pipe.scheduler.config), torch.Generator().manual_seed(config.seed)
    scheduler.set_timesteps(config.num_inference_steps, device=latents.device)
    noises = (randn_tensor(latents.shape, generator, latents.device, latents.dtype) for _ in scheduler.timesteps)
    path = [scheduler.add_noise(latents, noise, t[None]) for noise, t in zip(noises, scheduler.timesteps, strict=True)]
    return [*path, latents]


def _check_invertible(pipe: Model, config: GenerationConfig) -> None:
    if config.scheduler is not SchedulerName.DDIM or pipe.unet.config.time_cond_proj_dim is not None:
        raise InputError(f"a picture is opened with the scheduler ddim and a model made for it, got {config.scheduler}")
