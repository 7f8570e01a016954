"""Schedulers: any number of steps samples as diffusers does."""

from __future__ import annotations

import pytest
import torch

from fisedit.sampling.denoise import Engine
from tests.support import oracle
from tests.support.edits import as_oracle, config_of, latents, record
from tests.support.pipelines import SCHEDULERS, with_scheduler

each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)


@pytest.mark.sweep(1)
@each_scheduler
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_any_number_of_steps_samples_as_diffusers_does(pipelines, scheduler, steps):
    pipe = pipelines["shallow"]
    config = config_of(num_inference_steps=steps, scheduler=scheduler, guidance_scale=1.0, width=64, height=64)
    dense = oracle.dense_generate(with_scheduler(pipe, scheduler), as_oracle(config))
    assert torch.equal(latents(record(Engine(pipe), config)), dense.latents)
