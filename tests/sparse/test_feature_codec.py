"""Encoded maps: how far from what was recorded, what they take, and what sparse steps make of them."""

from __future__ import annotations

import pytest
import torch

from fisedit.errors import InputError
from fisedit.sparse.feature_cache import FeatureOverlay, StepFeatures
from fisedit.sparse.feature_codec import (
    CACHE_DTYPES,
    COARSE,
    LIMIT,
    FeatureEncoding,
    choose_encoding,
    encode,
    pack_nibbles,
    unpack_nibbles,
)
from tests.support.graph_steps import TIME, Case
from tests.support.grids import grids

CPU = torch.device("cpu")


def alike_branches(size=64, channels=32, change=0.2):
    """Two branches [2, size, channels] that differ little, with channels of very different ranges."""
    rows = torch.randn(2, size, channels)
    rows[0] = rows[1] + change * rows[0]
    return rows * torch.rand(channels).mul(6).sub(3).exp()


def test_every_number_of_four_bits_survives():
    """Of an odd and an even count of positions."""
    for size in (16, 15, 1):
        numbers = (torch.arange(size * 3).view(size, 3) % 16 - 8).to(torch.int8)
        packed = pack_nibbles(numbers)
        assert packed.shape == (-(-size // 2), 3)
        assert torch.equal(unpack_nibbles(packed, torch.empty_like(numbers)), numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoded_map_is_near_the_recorded_one(dtype):
    """Half a unit of the last branch, whichever bits it has, and that of the difference more for the other one."""
    for bits, unit in ((8, 1), (4, COARSE)):
        for size in (64, 63):
            rows = alike_branches(size).to(dtype)
            found = encode(rows, bits)
            scale = rows.float().abs().amax((0, 1)) / LIMIT
            error = (found.whole().float() - rows.float()).abs() / scale
            rounding = 1.5 if dtype is torch.bfloat16 else 0.01
            assert error[1].max() <= unit / 2 + rounding
            assert (error[0] <= unit / 2 + found.steps[0].float() / 2 + rounding).all()
            assert found.integers().abs().max() <= 127


def test_branches_share_their_error():
    """So that guidance, which goes from one branch to the other, does not multiply it."""
    rows = alike_branches(change=0.02)
    error = encode(rows, 4).whole() - rows
    assert (error[0] - error[1]).norm() < 0.2 * error[1].norm()


def test_rows_are_those_of_the_whole_map():
    for bits in (8, 4):
        for size, branches in ((64, 2), (63, 2), (63, 1)):
            found = encode(alike_branches(size)[-branches:], bits)
            at = torch.randint(0, size, (40,))
            assert torch.equal(found.rows(at), found.whole()[:, at])


def test_extremes_do_not_wrap_around():
    """Branches at opposite ends of a channel's range, constant maps, and zeros."""
    for bits in (8, 4):
        opposite = torch.tensor([1.0, -1.0]).view(2, 1, 1).expand(2, 8, 2) * torch.tensor([1.0, 1e-3])
        assert (encode(opposite, bits).whole() - opposite).abs().max() <= 0.2
        assert (encode(opposite, bits).whole().sign() == opposite.sign()).all()
        assert torch.equal(encode(torch.zeros(2, 4, 2), bits).whole(), torch.zeros(2, 4, 2))


def test_bytes_of_an_encoded_map():
    rows = torch.randn(2, 64, 32)
    assert [sum(t.nbytes for t in encode(rows, bits).tensors) for bits in (8, 4)] == [
        64 * 32 * share + 32 + 4 * 32 for share in (1.5, 1)
    ]


def test_names_of_encodings():
    assert choose_encoding("auto", CPU).bits == 8 and choose_encoding("auto", torch.device("meta")).bits == 16
    assert {name: choose_encoding(name, CPU) for name in CACHE_DTYPES} == CACHE_DTYPES
    with pytest.raises(InputError, match="cache_dtype must be one of auto, int8, int4, model, got 'fp8'; use auto"):
        choose_encoding("fp8", CPU)


@torch.inference_mode()
def test_a_step_over_encoded_maps_is_that_over_their_numbers(pipelines):
    """E4 with an encoded record: what is read is what it decodes to, by edits and by edits of edits."""
    for bits in (8, 4):
        case = Case(pipelines["shallow"].unet, [grids(8, 9)["blobs"]])
        levels, encoded = {site.name: site.level for site in case.executor.sites}, case.maps
        encoded.encode(FeatureEncoding(bits))
        decoded = StepFeatures(
            {name: encoded.whole(name, levels[name]) for name in encoded.maps}, dict(encoded.statistics)
        )
        given, steps = (case.latents[0], TIME, case.texts[0]), []
        for features in (encoded, decoded):
            _, first = case.executor.run_sparse(*given, {}, FeatureOverlay(features, case.plans[0]))
            out, second = case.executor.run_sparse(*given, {}, FeatureOverlay(first, case.plans[0]))
            steps.append((out, second.maps))
        (got, mine), (expected, theirs) = steps
        assert torch.allclose(got, expected, atol=1e-4)
        assert all(torch.allclose(mine[name], theirs[name], atol=2e-3) for name in theirs)
