"""Pictures to train on."""

from __future__ import annotations

import pytest

from training.pictures import Pictures, draw_pictures


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    return draw_pictures(1, 4, 128)
