"""Everything here runs as editors run it: without gradients."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_grad(no_grad: None) -> None:
    """Every test of this folder."""
