"""How many of a source's steps are recorded for edits that keep its structure."""

from __future__ import annotations

import pytest

from fisedit.sampling.trajectory import max_injection_steps
from fisedit.values import GenerationConfig, SchedulerName


@pytest.mark.parametrize(("steps", "expected"), [(1, 0), (5, 2), (25, 10), (50, 20)])
def test_the_first_two_fifths_of_the_steps(steps, expected):
    config = GenerationConfig("a cat", 7, "", steps, 4.0, 128, 128, SchedulerName.DDIM)
    assert max_injection_steps(config) == expected
