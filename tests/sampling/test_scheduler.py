"""Schedulers: any number of steps samples as diffusers does."""

from __future__ import annotations

import pytest
import torch

from fisedit.errors import InputError
from fisedit.sampling.denoise import Engine
from fisedit.sampling.scheduler import Sampler
from fisedit.values import SchedulerName
from tests.support import oracle
from tests.support.edits import as_oracle, config_of, latents, record
from tests.support.pipelines import ALL_SCHEDULERS, build_scheduler, with_scheduler

PLACE = torch.device("cpu"), torch.float32
each_scheduler = pytest.mark.parametrize("scheduler", ALL_SCHEDULERS)


@pytest.mark.sweep(1)
@each_scheduler
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_any_number_of_steps_samples_as_diffusers_does(pipelines, scheduler, steps):
    pipe = pipelines["shallow"]
    config = config_of(num_inference_steps=steps, scheduler=scheduler, guidance_scale=1.0, width=64, height=64)
    dense = oracle.dense_generate(with_scheduler(pipe, scheduler), as_oracle(config))
    ours = latents(record(Engine(pipe), config))
    assert torch.equal(ours, dense.latents) and len(ours) == config.num_timesteps + 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("DPM++ 2M Karras", SchedulerName.DPM_SOLVER_KARRAS),
        ("dpm++ sde karras", SchedulerName.DPM_SDE_KARRAS),
        ("Euler a", SchedulerName.EULER_ANCESTRAL),
        ("PLMS", SchedulerName.PNDM),
        ("UniPCMultistepScheduler", SchedulerName.UNIPC),
        ("DDIM trailing", SchedulerName.DDIM_TRAILING),
        ("ddim", SchedulerName.DDIM),
    ],
)
def test_names_of_web_uis_and_of_diffusers_are_understood(text, name):
    assert config_of(scheduler=text).scheduler is name and SchedulerName(name.label) is name


def test_rounding_makes_no_step_too_many():
    """diffusers' trailing timesteps are 62 for 61 steps, the last of them -1."""
    with pytest.raises(InputError, match="must divide the timesteps of ddim_trailing, got 61; use 60"):
        Sampler(config_of(scheduler="ddim_trailing", num_inference_steps=61), build_scheduler().config, 4, *PLACE)


def test_a_checkpoints_own_sigmas_do_not_change_what_a_name_means():
    own = dict(build_scheduler("dpmsolver++").config) | {"use_karras_sigmas": True, "algorithm_type": "sde-dpmsolver++"}
    made = Sampler(config_of(scheduler="dpmsolver++", num_inference_steps=9), own, 4, *PLACE)
    plain = Sampler(config_of(scheduler="dpmsolver++", num_inference_steps=9), build_scheduler().config, 4, *PLACE)
    assert torch.equal(made.timesteps, plain.timesteps)


def test_other_names_are_refused_with_those_that_are_known():
    with pytest.raises(InputError, match=r"scheduler must be one of ddim, .*tcd, got 'DPM9'"):
        config_of(scheduler="DPM9")
