"""Names of samplers that web UIs give in two parts."""

from __future__ import annotations

import pytest

from fisedit.values import SchedulerName, web_ui_scheduler


@pytest.mark.parametrize(
    ("sampler", "schedule", "meant"),
    [  # samplers_k_diffusion of Automatic1111's modules/sd_samplers_kdiffusion.py, version 1.9 on
        ("DPM++ 2M", "", "DPM++ 2M Karras"),
        ("DPM++ 2M", "Automatic", "DPM++ 2M Karras"),
        ("DPM++ SDE", "automatic", "DPM++ SDE Karras"),
        ("DPM++ 2M SDE", "", "DPM++ 2M SDE Exponential"),
        ("DPM++ 2M SDE", "Karras", "DPM++ 2M SDE Karras"),
        ("DPM++ 2M", "Uniform", "DPM++ 2M"),
        ("DPM++ 2M", "normal", "DPM++ 2M"),
        ("DPM++ 2M Karras", "Automatic", "DPM++ 2M Karras"),
        ("DPM++ 2M Karras", "karras", "DPM++ 2M Karras"),
        ("Euler a", "Automatic", "Euler a"),
        ("ddim", "", "DDIM"),
    ],
)
def test_a_schedule_that_is_not_chosen_is_the_samplers_own(sampler, schedule, meant):
    assert SchedulerName(web_ui_scheduler(sampler, schedule)).label == meant


def test_a_schedule_that_is_not_here_stays_in_the_name_that_is_refused():
    assert web_ui_scheduler("Euler", "Beta") == "Euler Beta"
