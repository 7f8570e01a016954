"""Sums over latent cells: those of flat maps hold in every type."""

import pytest
import torch

from fisedit.decoder.norms import cell_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_flat_maps_are_float64s(dtype):
    """A square of 12.0625 needs 15 bits: rounded to 8 of bfloat16, a fifth of a variance of 1 would be lost."""
    x = torch.full((1, 4, 32, 32), 12.0625, dtype=dtype).contiguous(memory_format=torch.channels_last)
    sums = cell_sums(x, 2, (8, 8)).double()
    assert sums.shape == (2, 2, 8, 8)
    mean, square = (sums.sum((2, 3)) / (2 * 32 * 32)).unbind(1)
    assert torch.allclose(square - mean.square(), torch.zeros(2, dtype=torch.float64), atol=1e-4)
