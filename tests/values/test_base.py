"""Booleans are refused wherever a number is asked, in Python and by the server's limits."""

from __future__ import annotations

import pytest

from app import validation
from fisedit.errors import InputError
from fisedit.integrations.mask_providers import check_choice
from fisedit.masking.region_values import check_border
from fisedit.values import check_structure, first_step, make_adapter_use, make_generation_config


@pytest.mark.parametrize(
    "check",
    [
        check_structure,
        check_border,
        lambda value: first_step(value, 10),
        lambda value: check_choice(value, "all"),
        lambda value: make_generation_config("a cat", guidance_scale=value),
        lambda value: make_generation_config("a cat", seed=value),
        lambda value: make_adapter_use(scale=value),
        lambda value: make_adapter_use(control_guidance_end=value),
        lambda value: validation.check_settings(validation.SourceSettings(seed=value)),
        lambda value: validation.check_settings(validation.SourceSettings(guidance=value)),
    ],
)
def test_a_boolean_is_no_number(check):
    with pytest.raises(InputError, match="got True"):
        check(True)
