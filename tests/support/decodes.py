"""Sizes, grids and grey levels that tests of the decoder share."""

from __future__ import annotations

import numpy as np
import pytest

from fisedit.decoder.compositing import composite
from fisedit.decoder.decode import decode_sparse
from tests.support.grids import grids

SIZES = [(16, 16), (13, 17)]
each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
each_grid = pytest.mark.parametrize("name", grids(8, 8))


def levels(image):
    return np.asarray(image).astype(int)


def pixels_of(grid):
    return np.kron(grid, np.ones((8, 8), bool))


def decode_into(source, vae, latents, grid, record):
    """A sparse decode set into the source's picture, and its record."""
    picture, kept = decode_sparse(vae, latents, grid, record)
    return composite(source, picture, grid), kept
