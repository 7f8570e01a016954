"""The first step of an edit and its strength say the same."""

from __future__ import annotations

import pytest

from fisedit.values import first_step, strength_for_start


@pytest.mark.parametrize("steps", [1, 5, 10, 25, 999])
def test_a_first_step_s_strength_gives_that_step_again(steps):
    strengths = [strength_for_start(start, steps) for start in range(steps)]
    assert all(0 < strength <= 1 for strength in strengths)
    assert [first_step(strength, steps) for strength in strengths] == list(range(steps))
