"""Samplers as sums: the same steps as diffusers' schedulers, asked once and never again."""

from __future__ import annotations

import pytest
import torch

from fisedit.errors import NumericsError
from fisedit.sampling.linear_scheduler import LinearSampler, coefficients
from fisedit.sampling.scheduler import Sampler
from tests.support.edits import config_of
from tests.support.pipelines import ALL_SCHEDULERS, build_scheduler

PLACE = torch.device("cpu"), torch.float32
STEPS = 7

LONG_MEMORY = ("pndm", "unipc")
"""Schedulers that remember more than one step."""


def samplers(config, scheduler_config, noises=()):
    steps = coefficients(config, scheduler_config, noisy=bool(noises))
    assert steps is not None
    return Sampler(config, scheduler_config, 4, *PLACE, noises), LinearSampler(
        steps, config, scheduler_config, 4, *PLACE, noises
    )


def settings(scheduler):
    """A scheduler's scheduler_config, free to be changed: without the list of what was left at its default."""
    return {name: value for name, value in scheduler.config.items() if not name.startswith("_")}


def check_run(theirs, ours):
    """Step both with the same numbers, latents moved in between as by blending."""
    latents = theirs.latents
    assert torch.equal(latents, ours.latents)
    for i in range(len(theirs.timesteps)):
        assert torch.allclose(theirs.scaled(latents, i), ours.scaled(latents, i), atol=1e-6)
        prediction = torch.randn_like(latents)
        expected, got = (sampler.step(prediction, i, latents) for sampler in (theirs, ours))
        for mine, their in ((got, expected), (ours.estimate, theirs.estimate)):
            assert (mine - their).abs().max() <= 1e-4 * their.abs().max()
        latents = torch.where(torch.rand_like(latents) < 0.5, expected, torch.randn_like(latents))
    ours.raise_if_not_finite()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("steps", [1, 2, STEPS, 20])
@pytest.mark.parametrize("scheduler", [name for name in ALL_SCHEDULERS if name not in LONG_MEMORY])
def test_every_scheduler(scheduler, steps, prediction):
    scheduler_config = build_scheduler("ddim", prediction).config
    check_run(*samplers(config_of(scheduler=scheduler, num_inference_steps=steps), scheduler_config))


def test_with_the_noise_that_inversion_found():
    config = config_of(num_inference_steps=STEPS)
    check_run(*samplers(config, build_scheduler().config, [torch.randn(1, 4, 16, 16) for _ in range(STEPS)]))


@pytest.mark.parametrize(
    "change", [{"clip_sample": True}, {"thresholding": True}], ids=lambda change: next(iter(change))
)
def test_one_that_clips_is_no_sum(change):
    config, scheduler_config = config_of(num_inference_steps=STEPS), settings(build_scheduler())
    assert coefficients(config, scheduler_config) is not None
    assert coefficients(config, scheduler_config | change) is None


def test_one_that_remembers_two_steps_is_no_sum():
    for name in LONG_MEMORY:
        config = config_of(scheduler=name, num_inference_steps=STEPS)
        assert coefficients(config, build_scheduler().config) is None
    scheduler_config = settings(build_scheduler("dpmsolver++")) | {"solver_order": 3}
    assert coefficients(config_of(scheduler="dpmsolver++", num_inference_steps=20), scheduler_config) is None


def test_the_first_step_that_was_not_finite_is_named_at_the_end():
    config, scheduler_config = config_of(num_inference_steps=STEPS), build_scheduler().config
    _, sampler = samplers(config, scheduler_config)
    for i in range(STEPS):
        sampler.step(torch.full_like(sampler.latents, float("nan") if i == 3 else 0.0), i, sampler.latents)
    with pytest.raises(NumericsError, match=f"at timestep {int(sampler.timesteps[3])}; use a lower guidance_scale"):
        sampler.raise_if_not_finite()
