"""The autoencoder's loss."""

from __future__ import annotations

import pytest
import torch

from training.autoencoder import picture_loss


def error(red: float, green: float, blue: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A flat picture, and one that differs from it by so much."""
    truth = torch.zeros(1, 3, 16, 16)
    return truth + torch.tensor([red, green, blue])[None, :, None, None], truth


def test_hues_count_by_themselves_and_brightness_does_not():
    """Of two errors of one size, that of a hue costs more, the more the colour weighs."""
    grey, hue = (picture_loss(*error(*rgb), 0.3, 2.0) for rgb in ((0.1, 0.1, 0.1), (0.1, -0.1, 0.1)))
    assert float(grey) == pytest.approx(float(picture_loss(*error(0.1, 0.1, 0.1), 0.3)))
    assert float(hue - grey) == pytest.approx(2.0 * (0.2 + 0.1))
    assert float(picture_loss(*error(0.1, -0.1, 0.1), 0.3)) == pytest.approx(float(grey), rel=1e-6)


def test_hues_of_fine_detail_average_out():
    """Over 4 pixels each way, so that edges and noise are left to the other terms."""
    truth = torch.zeros(1, 3, 16, 16)
    noise = torch.ones(16, 16)
    noise[::2, ::2] = noise[1::2, 1::2] = -1
    noisy = truth.clone()
    noisy[:, 0] = 0.1 * noise
    assert float(picture_loss(noisy, truth, 0.0, 2.0) - picture_loss(noisy, truth, 0.0)) == pytest.approx(0, abs=1e-6)
