"""Grounding losses and localisation figures on maps whose values are known."""

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

from training import attention
from training.attention import NOISE_STEPS, Localisation, auc, iou, measure_localisation
from training.config import Denoiser, Plan
from training.grounding import grounding_losses, record_cross_attention
from training.latents import PARTS, LatentScenes
from training.linear import convolve_linears
from training.models import build_unet

PLAN = Plan(batch=2, seconds=1, steps=1, learning_rate=1e-3)


def test_perfect_attention_costs_nothing_and_misplaced_attention_does() -> None:
    masks = torch.zeros(1, 2, 16, 16)
    masks[0, 0, :8] = 1
    perfect = torch.zeros(1, 256, 5)
    perfect[0, :, 3] = masks[0, 0].flatten()
    positions = torch.tensor([[3, -1]])
    token, pixel = grounding_losses([perfect], positions, masks, least=8)
    assert token == pytest.approx(0)
    assert pixel == pytest.approx(0, abs=1e-5)
    token, pixel = grounding_losses([perfect.flip(1)], positions, masks, least=8)
    assert token == pytest.approx(1)
    assert pixel > 5


def test_recording_attention_leaves_the_prediction_as_it_is() -> None:
    torch.manual_seed(0)
    unet = build_unet(Denoiser(PLAN, channels=(16, 16, 32), groups=8, heads=2, text_width=16), 16).eval()
    noised, text = torch.randn(2, 4, 16, 16), torch.randn(2, 77, 16)
    with torch.no_grad():
        before = unet(noised, 10, text).sample
        maps = record_cross_attention(unet)
        after = unet(noised, 10, text).sample
    layers = maps.take()
    assert torch.allclose(before, after, atol=1e-5)
    assert all(torch.allclose(layer.sum(-1), torch.ones(layer.shape[:2]), atol=1e-5) for layer in layers)
    assert maps.take() == []
    unet.set_attn_processor(AttnProcessor2_0())


def test_convolved_linears_compute_the_same_and_keep_their_names() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4, bias=False))
    rows, names = torch.randn(2, 5, 8), list(plain.state_dict())
    before = plain(rows)
    convolve_linears(plain)
    assert torch.allclose(plain(rows), before, atol=1e-6)
    assert plain(rows[0]).shape == (5, 4)
    assert list(plain.state_dict()) == names


def test_auc_and_iou_of_known_maps() -> None:
    truth = np.array([True, True, False, False])
    assert auc(np.array([0.9, 0.8, 0.2, 0.1]), truth) == 1
    assert auc(np.array([0.1, 0.2, 0.8, 0.9]), truth) == 0
    assert auc(np.array([0.5, 0.5, 0.5, 0.5]), truth) == 0.5
    assert iou(np.array([True, True, True, False]), truth) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("turned", "expected"), [(False, Localisation(1, 1)), (True, Localisation(0, 0))])
def test_words_that_attend_to_their_objects_localise_perfectly(
    monkeypatch: pytest.MonkeyPatch, turned: bool, expected: Localisation
) -> None:
    masks, positions = torch.zeros(2, PARTS, 16, 16), torch.full((2, PARTS), -1)
    masks[0, 0, :8], masks[0, 1, 8:, :4], masks[1, 0, 4:12, 4:12] = 1, 1, 1
    positions[0, 0], positions[0, 1], positions[1, 0] = 2, 5, 3
    maps = torch.zeros(2, 256, 77)
    for row, slot in (positions >= 0).nonzero().tolist():
        seen = masks[row, slot].flatten()
        maps[row, :, positions[row, slot]] = 1 - seen if turned else seen
    empty = torch.zeros(2, 4, 16, 16)
    scenes = LatentScenes(empty, empty, torch.zeros(2, 77, dtype=torch.long), positions, masks)
    monkeypatch.setattr(attention, "mean_word_maps", lambda *_: [maps] * len(NOISE_STEPS))
    assert measure_localisation(None, scenes, seed=0) == expected
