"""Schedulers: any number of steps samples as diffusers does."""

from __future__ import annotations

import re

import pytest
import torch

from fisedit.errors import InputError
from fisedit.sampling.engine import Engine
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


@pytest.mark.parametrize("scheduler", ["dpmsolver++_karras", "dpmsolver++_sde_karras", "dpm_sde_karras"])
def test_an_edit_may_begin_at_either_of_two_equal_timesteps(scheduler):
    """Noise is added and steps are counted from that very step, as diffusers' image-to-image does."""
    config = config_of(scheduler=scheduler, num_inference_steps=100)
    times = Sampler(config, build_scheduler().config, 4, *PLACE).timesteps
    twice = [i for i in range(1, len(times)) if times[i] == times[i - 1]]
    assert twice
    for begin in (twice[0] - 1, twice[0]):
        theirs = build_scheduler(scheduler)
        theirs.set_timesteps(100)
        theirs.set_begin_index(begin)
        ours, clean = Sampler(config, build_scheduler().config, 4, *PLACE), torch.full((1, 4, 16, 16), 0.5)
        latents = ours.noised(clean, begin)
        assert torch.equal(latents, theirs.add_noise(clean, ours._first_noise, times[begin : begin + 1]))
        for i in range(begin, len(times)):
            expected = theirs.step(clean, times[i], latents, generator=torch.Generator().manual_seed(i)).prev_sample
            ours._generator.manual_seed(i)
            latents = ours.step(clean, i, latents)
            assert torch.equal(latents, expected)


def zero_snr(prediction):
    """A model's config, without diffusers' list of what was left at its default."""
    own = build_scheduler("ddim", prediction).config
    return {name: own[name] for name in own if not name.startswith("_")} | {"rescale_betas_zero_snr": True}


@pytest.mark.parametrize("scheduler", SchedulerName)
def test_zero_terminal_snr_is_used_or_refused_by_name(scheduler):
    zero = zero_snr("v_prediction")
    config = config_of(scheduler=scheduler, num_inference_steps=4)
    zero["timestep_spacing"] = "trailing"
    if scheduler in ("heun", "pndm", "dpm_sde", "dpm_sde_karras"):  # diffusers' drop it
        with pytest.raises(InputError, match=f"the model's rescale_betas_zero_snr, got {scheduler}; use one of ddim"):
            Sampler(config, zero, 4, *PLACE)
    else:
        assert Sampler(config, zero, 4, *PLACE)._scheduler.alphas_cumprod[-1] < 1e-6


UNKNOWN = {"sample": ("euler_a", "pndm"), "flow_prediction": ("ddim", "euler", "heun"), "x": SchedulerName}


def test_a_prediction_that_a_sampler_does_not_know_is_refused():
    """diffusers raises in the first step; a name that no sampler knows is one of no model."""
    config = dict(build_scheduler("ddim").config)
    for prediction, names in UNKNOWN.items():
        use = "none does; correct" if prediction == "x" else "use one of .*dpmsolver"
        for name in names:
            got = rf"the model's prediction_type {prediction}, got {re.escape(name)}; {use}"
            with pytest.raises(InputError, match=got):
                Sampler(config_of(scheduler=name), config | {"prediction_type": prediction}, 4, *PLACE)
    Sampler(config_of(scheduler="unipc"), config | {"prediction_type": "flow_prediction"}, 4, *PLACE)


def test_noise_alone_is_not_told_from_a_picture():
    zero = zero_snr("epsilon")
    with pytest.raises(InputError, match=r"v_prediction where .* tcd begins at timestep 999, got epsilon; correct the"):
        Sampler(config_of(scheduler="tcd", num_inference_steps=4), zero, 4, *PLACE)
    Sampler(config_of(scheduler="ddim", num_inference_steps=4), zero, 4, *PLACE)  # begins at 751
