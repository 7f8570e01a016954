"""Boxes and halos of the sparse decode as tests need them: of any size, and reaching everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from fisedit.sparse import vae_tiles

FAR = 512


@pytest.fixture
def boxed(monkeypatch):
    """Boxes however large they are."""
    monkeypatch.setattr(vae_tiles, "DENSE_SHARE", np.inf)
    monkeypatch.setattr(vae_tiles, "DENSE_CELLS", 0)


@pytest.fixture
def far(monkeypatch):
    """Rows and a halo that reach everywhere."""
    monkeypatch.setattr(vae_tiles, "HALO", FAR)
    monkeypatch.setattr(vae_tiles, "DILATION", FAR)
