"""Timesteps, noise and one step of a sampler, by diffusers' own schedulers.

Knows schedulers and latents; knows nothing about the UNet, features or prompts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    TCDScheduler,
    UniPCMultistepScheduler,
)
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from fisedit.errors import InputError, NumericsError
from fisedit.machine.device import advice_on_overflow
from fisedit.values import LATENT_FACTOR, GenerationConfig, SchedulerName

_SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_PLAIN, _TRAILING = dict.fromkeys(_SIGMAS, False), {"timestep_spacing": "trailing"}
_KARRAS = _PLAIN | {"use_karras_sigmas": True}
_EXPONENTIAL = _PLAIN | {"use_exponential_sigmas": True}
_ODE, _SDE = {"algorithm_type": "dpmsolver++"}, {"algorithm_type": "sde-dpmsolver++"}
_OF_MODELS = ("rescale_betas_zero_snr", "use_flow_sigmas")  # what a model was trained for, and a sampler may not know
_UNEVEN = {"lower_order_final": True}  # two evaluations a step of the second order do not divide every number of steps

SCHEDULERS: dict[SchedulerName, tuple[Any, dict[str, Any]]] = {
    SchedulerName.DDIM: (DDIMScheduler, {}),
    SchedulerName.DDIM_TRAILING: (DDIMScheduler, _TRAILING),
    SchedulerName.DPM_SOLVER: (DPMSolverMultistepScheduler, _PLAIN | _ODE),
    SchedulerName.DPM_SOLVER_KARRAS: (DPMSolverMultistepScheduler, _KARRAS | _ODE),
    SchedulerName.DPM_SOLVER_SDE: (DPMSolverMultistepScheduler, _PLAIN | _SDE),
    SchedulerName.DPM_SOLVER_SDE_KARRAS: (DPMSolverMultistepScheduler, _KARRAS | _SDE),
    SchedulerName.DPM_SOLVER_SDE_EXPONENTIAL: (DPMSolverMultistepScheduler, _EXPONENTIAL | _SDE),
    SchedulerName.DPM_SDE: (DPMSolverSinglestepScheduler, _PLAIN | _SDE | _UNEVEN),
    SchedulerName.DPM_SDE_KARRAS: (DPMSolverSinglestepScheduler, _KARRAS | _SDE | _UNEVEN),
    SchedulerName.EULER: (EulerDiscreteScheduler, _PLAIN),
    SchedulerName.EULER_TRAILING: (EulerDiscreteScheduler, _PLAIN | _TRAILING),
    SchedulerName.EULER_ANCESTRAL: (EulerAncestralDiscreteScheduler, {}),
    SchedulerName.HEUN: (HeunDiscreteScheduler, _PLAIN),
    SchedulerName.PNDM: (PNDMScheduler, {"skip_prk_steps": True}),
    SchedulerName.UNIPC: (UniPCMultistepScheduler, _PLAIN),
    SchedulerName.LCM: (LCMScheduler, {}),
    SchedulerName.TCD: (TCDScheduler, {}),
}
"""Name -> diffusers' class, and what its config has instead of the model's."""


class Sampler:
    """One run of a config's scheduler, from first noise to last latents; make a new one for every run.

    The noise is that of diffusers' pipelines. A CPU generator seeded with the config's seed draws the first latents and
    then, for stochastic samplers, every step's noise. So an edit meets the very noise its source met.

    Args:
        config: scheduler, steps, seed and size.
        scheduler_config: the model's scheduler config (betas, prediction type, offsets).
        channels: latent channels.
        device: The device of the latents.
        dtype: The dtype of the latents.
        noises: [1, C, h, w] of every step, which then is DDPM's (DDIM's with eta 1); () for the scheduler's own.
    """

    def __init__(
        self,
        config: GenerationConfig,
        scheduler_config: Any,
        channels: int,
        device: torch.device,
        dtype: torch.dtype,
        noises: Sequence[Tensor] = (),
    ) -> None:
        scheduler, changes = SCHEDULERS[config.scheduler]
        _check_knows(config.scheduler, scheduler_config)
        self._scheduler = scheduler.from_config(scheduler_config, **changes)
        try:
            self._scheduler.set_timesteps(config.num_inference_steps, device=device)
        except ValueError as error:  # LCM takes at most the steps it was distilled from
            steps, name = config.num_inference_steps, config.scheduler
            raise InputError(f"num_inference_steps must suit the scheduler {name}, got {steps}; use fewer") from error
        self._generator = torch.Generator().manual_seed(config.seed)
        step_parameters = inspect.signature(self._scheduler.step).parameters
        self._extra_step_kwargs = {"generator": self._generator} if "generator" in step_parameters else {}
        self._noises = noises
        self._noise_dtype = torch.float32 if scheduler is DPMSolverMultistepScheduler else dtype
        self.timesteps: Tensor = self._scheduler.timesteps
        if len(self.timesteps) != config.num_timesteps:  # trailing ones of some numbers of steps, such as 61: rounding
            steps, name = config.num_inference_steps, config.scheduler
            raise InputError(f"num_inference_steps must divide the timesteps of {name}, got {steps}; use {steps - 1}")
        _check_first(config.scheduler, self._scheduler)
        shape = (1, channels, config.height // LATENT_FACTOR, config.width // LATENT_FACTOR)
        self._first_noise = randn_tensor(shape, generator=self._generator, device=device, dtype=dtype)
        self.latents: Tensor = self._first_noise * self._scheduler.init_noise_sigma
        """The first latents [1, C, h, w]."""
        self.estimate: Tensor = self.latents
        """The clean latents as the last step estimated them, or its latents where the scheduler does not say."""

    def noised(self, clean: Tensor, step: int) -> Tensor:
        """Latents before a step that come from others by the seed's noise, as diffusers' image-to-image begins.

        Args:
            clean: [1, C, h, w] without noise.
            step: index of the step, 0 to N - 1; before the first one there is nothing but noise.
        """
        if not step:
            return self.latents
        self._begin(step)
        noised: Tensor = self._scheduler.add_noise(clean, self._first_noise, self.timesteps[step : step + 1])
        return noised

    def scaled(self, latents: Tensor, step: int) -> Tensor:
        """Latents as the UNet takes them before a step, by diffusers' `scale_model_input`."""
        self._begin(step)
        result: Tensor = self._scheduler.scale_model_input(latents, self.timesteps[step])
        return result

    def step(self, prediction: Tensor, step: int, latents: Tensor) -> Tensor:
        """The next latents [E, C, h, w], of E edits or frames that share the steps.

        Args:
            prediction: the guided prediction [E, C, h, w].
            step: its index, 0 to N - 1; one follows on another.
            latents: [E, C, h, w] before the step.

        Raises:
            NumericsError: the model predicted NaN or infinity.
        """
        self._begin(step)
        noise, timestep = self._noises[step] if self._noises else None, self.timesteps[step]
        extra_step_kwargs = self._extra_step_kwargs if noise is None else {"eta": 1.0, "variance_noise": noise}
        out = self._scheduler.step(prediction, timestep, latents, **extra_step_kwargs)
        next_latents: Tensor = out.prev_sample
        if not next_latents.isfinite().all():
            raise self._not_finite(step)
        clean: Tensor | None = getattr(out, "pred_original_sample", None)
        self.estimate = next_latents if clean is None else clean
        return next_latents

    def noise_between(self, prediction: Tensor, step: int, latents: Tensor, next_latents: Tensor) -> Tensor:
        """The noise with which a step of DDPM leads from latents to the next ones.

        Args:
            prediction: the guided prediction [1, C, h, w].
            step: its index, 0 to N - 1.
            latents: [1, C, h, w] before the step.
            next_latents: [1, C, h, w] after it.

        Returns:
            [1, C, h, w]; zero where the step has no noise, as the last one of some schedules, and leads to the mean.
        """
        zero_noise = torch.zeros_like(latents, dtype=torch.float32)
        mean, shifted_mean = (
            self._scheduler.step(
                prediction.float(), self.timesteps[step], latents.float(), eta=1.0, variance_noise=noise
            ).prev_sample
            for noise in (zero_noise, zero_noise + 1)
        )
        scale = (shifted_mean - mean).mean()
        noise: Tensor = (next_latents - mean) / scale if scale > 0 else zero_noise
        return noise.to(latents.dtype)

    def _begin(self, step: int) -> None:
        """Tell a scheduler that counts its steps which one is the first; by a time alone it may take its equal."""
        if getattr(self._scheduler, "step_index", 0) is None:
            self._scheduler.set_begin_index(step)

    def _not_finite(self, step: int) -> NumericsError:
        timestep = int(self.timesteps[step])
        return NumericsError(
            f"latents turned NaN or infinite at timestep {timestep}; {advice_on_overflow(self.latents.dtype)}"
        )


def _check_knows(name: SchedulerName, scheduler_config: Mapping[str, Any]) -> None:
    """Raise InputError for a sampler that drops what the model was trained for."""
    for setting in _OF_MODELS:
        known = [other for other, (kind, _) in SCHEDULERS.items() if setting in inspect.signature(kind).parameters]
        if scheduler_config.get(setting) and name not in known:
            others = ", ".join(known)
            raise InputError(f"scheduler must know the model's {setting}, got {name}; use one of {others}")
    prediction = str(scheduler_config.get("prediction_type", "epsilon"))
    if not _predicts(name, prediction):
        others = ", ".join(other for other in SCHEDULERS if _predicts(other, prediction))
        advice = f"use one of {others}" if others else "none does; correct the model's scheduler config"
        raise InputError(f"scheduler must know the model's prediction_type {prediction}, got {name}; {advice}")


@lru_cache
def _predicts(name: SchedulerName, prediction: str) -> bool:
    """Return whether a sampler knows a prediction type, which diffusers' classes tell in a step alone: one is tried."""
    kind, changes = SCHEDULERS[name]
    scheduler, nothing = kind.from_config({"prediction_type": prediction}, **changes), torch.zeros(1, 4, 1, 1)
    scheduler.set_timesteps(4)
    try:
        scheduler.step(scheduler.scale_model_input(nothing, scheduler.timesteps[0]), scheduler.timesteps[0], nothing)
    except (ValueError, NotImplementedError):
        return False
    return True


def _check_first(name: SchedulerName, scheduler: Any) -> None:
    """Raise InputError for noise without signal that is to be told from a picture: the result is infinite."""
    first = int(scheduler.timesteps[0])
    if scheduler.config.prediction_type == "epsilon" and scheduler.alphas_cumprod[first] == 0:
        raise InputError(
            f"prediction_type must be v_prediction where rescale_betas_zero_snr is set and {name} begins at timestep "
            f"{first}, got epsilon; correct the model's scheduler config"
        )


def mask_steps(timesteps: Tensor, count: int = 4) -> tuple[int, ...]:
    """Steps whose attention separates objects.

    They are at most `count`, evenly over timesteps 150 to 350, where the maps of drawn objects localise best. If none
    lies there, the nearest to 250 is taken.
    """
    times = timesteps.float()
    candidates = ((times >= 150) & (times <= 350)).nonzero().flatten().tolist()
    if not candidates:
        return (int((times - 250).abs().argmin()),)
    indices = torch.linspace(0, len(candidates) - 1, min(count, len(candidates))).round().int().tolist()
    return tuple(candidates[i] for i in indices)
