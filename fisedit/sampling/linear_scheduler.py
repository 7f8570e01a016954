"""A sampler whose steps are sums: what diffusers' scheduler makes of latents and predictions, found by running it once.

The schedulers here are linear in the latents, the predictions and the noise. Their coefficients are found by one run on
small tensors of the host. From then on a step is arithmetic on the device, and the host waits for nothing. One that is
not linear (clipping, thresholds, longer memories) is left as it is. Knows samplers, as `scheduler` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from fisedit.sampling.scheduler import Sampler
from fisedit.values import LATENT_FACTOR, GenerationConfig

NOISE_COLUMNS, CHECK_COLUMNS = 16, 16
"""Columns of the input with the scheduler's noise alone, and with random numbers to check the coefficients by."""

TOLERANCE = 1e-4
"""Largest deviation from the scheduler's own latents, in units of the largest number in a step."""

ROUNDING = 1e-6
"""Coefficients below this are rounding errors."""


@dataclass(frozen=True)
class Terms:
    """Coefficients of a linear combination: of a step's latents and prediction, of those of the step before, and of the
    step's noise."""

    latents: float
    prediction: float
    latents_before: float
    prediction_before: float
    noise: float


@dataclass(frozen=True)
class Coefficients:
    """One step: what the UNet's input is scaled by, the next latents, the estimate of the clean ones."""

    scale: float
    next_latents: Terms
    estimate: Terms


def coefficients(
    config: GenerationConfig, scheduler_config: Any, *, noisy: bool = False
) -> tuple[Coefficients, ...] | None:
    """The coefficients of a scheduler's steps, None where a step is not linear in latents, predictions and noise.

    They are found by one run over columns that do not mix. In each, the latents or the prediction of one step is 1 and
    all else 0. Some hold noise alone, and some hold random numbers, by which the result is checked.

    Args:
        config: scheduler, steps and seed.
        scheduler_config: the model's scheduler config.
        noisy: with the noise of every step given (eta 1), as `Sampler` takes it.
    """
    steps = config.num_timesteps
    columns = 2 * steps + NOISE_COLUMNS + CHECK_COLUMNS
    probe_config = replace(config, width=columns * LATENT_FACTOR, height=LATENT_FACTOR)
    shape, generator = (1, 1, 1, columns), torch.Generator().manual_seed(config.seed)
    # The first are the first latents.
    random_numbers = torch.cat([torch.randn(shape, generator=generator) for _ in range(steps + 1)])
    noise, check_generator = random_numbers[1:].view(steps, columns), torch.Generator().manual_seed(config.seed + 1)
    inputs = torch.zeros(2, steps, columns)
    inputs[:, :, -CHECK_COLUMNS:] = torch.randn(2, steps, CHECK_COLUMNS, generator=check_generator)
    inputs[0, :, :steps], inputs[1, :, steps : 2 * steps] = torch.eye(steps), torch.eye(steps)
    latents, predictions = inputs
    noises = list(noise.view(-1, *shape)) if noisy else []
    sampler = Sampler(probe_config, scheduler_config, 1, torch.device("cpu"), torch.float32, noises)
    scales, expected = [], torch.zeros(2, steps, columns)
    for i in range(steps):
        scales.append(float(sampler.scaled(torch.ones(1), i)))
        expected[0, i] = sampler.step(predictions[i].view(shape), i, latents[i].view(shape)).flatten()
        expected[1, i] = sampler.estimate.flatten()
    terms_by_output = [[_terms(row[i], noise[i], i) for i in range(steps)] for row in expected]
    for row, terms in zip(expected, terms_by_output, strict=True):
        for i, term in enumerate(terms):
            predicted = _sum(term, i, latents, predictions, noise[i])[-CHECK_COLUMNS:]
            if not torch.allclose(
                predicted, row[i, -CHECK_COLUMNS:], rtol=0, atol=TOLERANCE * float(row[i].abs().max() + 1)
            ):
                return None
    return tuple(Coefficients(*step_coefficients) for step_coefficients in zip(scales, *terms_by_output, strict=True))


def _terms(row: Tensor, noise: Tensor, i: int) -> Terms:
    """The terms of step i, from what the scheduler made of every column [2 N + NOISE_COLUMNS + CHECK_COLUMNS]."""
    steps = (len(row) - NOISE_COLUMNS - CHECK_COLUMNS) // 2
    noise_columns = slice(2 * steps, 2 * steps + NOISE_COLUMNS)
    noise_coefficient = row[noise_columns].dot(noise[noise_columns]) / noise[noise_columns].square().sum()
    row_coefficients = (row - noise_coefficient * noise).tolist()
    before = [row_coefficients[i - 1], row_coefficients[steps + i - 1]] if i else [0.0, 0.0]
    other_terms = (value if abs(value) > ROUNDING else 0.0 for value in (*before, float(noise_coefficient)))
    return Terms(row_coefficients[i], row_coefficients[steps + i], *other_terms)


def _sum(
    terms: Terms, i: int, latents: Sequence[Tensor], predictions: Sequence[Tensor], noise: Tensor | None
) -> Tensor:
    """A step's sum in float32; the sequences reach to step i at least."""
    total = terms.latents * latents[i].float() + terms.prediction * predictions[i].float()
    if terms.latents_before or terms.prediction_before:
        total += terms.latents_before * latents[i - 1].float() + terms.prediction_before * predictions[i - 1].float()
    return total if noise is None or not terms.noise else total + terms.noise * noise.float()


class LinearSampler(Sampler):
    """`Sampler` by known coefficients: called for its steps in their order, it never makes the host wait.

    Args:
        steps: from `coefficients`, of this config and scheduler config. The others as in `Sampler`.
    """

    def __init__(
        self,
        steps: Sequence[Coefficients],
        config: GenerationConfig,
        scheduler_config: Any,
        channels: int,
        device: torch.device,
        dtype: torch.dtype,
        noises: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(config, scheduler_config, channels, device, dtype, noises)
        self._steps, self._noise = steps, list(noises)
        if not noises and any(step.next_latents.noise for step in steps):
            shape, generator = self.latents.shape, self._generator
            self._noise = [
                randn_tensor(shape, generator=generator, device=device, dtype=self._noise_dtype) for _ in steps
            ]
        self._history: tuple[list[Tensor], list[Tensor]] = [], []
        self._finite: list[Tensor] = []

    def scaled(self, latents: Tensor, step: int) -> Tensor:
        """See `Sampler`."""
        scale = self._steps[step].scale
        return latents if scale == 1 else latents * scale

    def step(self, prediction: Tensor, step: int, latents: Tensor) -> Tensor:
        """See `Sampler`; what is NaN or infinite is found by `raise_if_not_finite`, at the end."""
        self._history[0].append(latents)
        self._history[1].append(prediction)
        terms, noise = self._steps[step], self._noise[step] if self._noise else None
        next_latents = _sum(terms.next_latents, step, *self._history, noise).to(latents.dtype)
        same = terms.estimate == terms.next_latents
        self.estimate = next_latents if same else _sum(terms.estimate, step, *self._history, noise).to(latents.dtype)
        self._finite.append(next_latents.isfinite().all())
        return next_latents

    def raise_if_not_finite(self) -> None:
        """Check the latents of all steps at once. Here the host waits.

        Raises:
            NumericsError: the model predicted NaN or infinity.
        """
        finite = torch.stack(self._finite).tolist() if self._finite else []
        if not all(finite):
            raise self._not_finite(finite.index(False))
