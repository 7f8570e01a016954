"""Encoded maps: how far from what was recorded, what they take, and what sparse steps make of them."""

from __future__ import annotations

from hashlib import sha256
from itertools import product

import pytest
import torch

from fisedit.errors import InputError
from fisedit.features.cache import FeatureOverlay, StepFeatures
from fisedit.features.codec import (
    BLOCK,
    CACHE_DTYPES,
    LIMIT,
    FeatureEncoding,
    choose_encoding,
    encode,
    from_tensors,
    pack_nibbles,
    to_tensors,
    unpack_nibbles,
)
from fisedit.runners.cuda_graphs import GraphExecutor
from fisedit.sparse_kernels import tuning
from tests.support.graph_steps import TIME, Case
from tests.support.grids import grids

CPU = torch.device("cpu")


def alike_branches(size=64, channels=32, change=0.2):
    """Two branches [2, size, channels] that differ little, with channels of very different ranges."""
    rows = torch.randn(2, size, channels)
    rows[0] = rows[1] + change * rows[0]
    return rows * torch.rand(channels).mul(6).sub(3).exp()


def units_of(found, size):
    """The unit of the last branch and the step of the other one, of every number [size, channels] or of all."""
    if found.units is None:
        return 1, found.steps[0].float()
    block, of = torch.arange(size) // BLOCK, torch.empty(-(-size // BLOCK), found.scales.numel(), dtype=torch.int8)
    unit, step = (unpack_nibbles(packed, of.clone()).float() + 8 for packed in (found.units, found.steps[0]))
    return unit[block] + 1, 2 * step[block] + 1


def test_every_number_of_four_bits_survives():
    """Of an odd and an even count of positions."""
    for size in (16, 15, 1):
        numbers = (torch.arange(size * 3).view(size, 3) % 16 - 8).to(torch.int8)
        packed = pack_nibbles(numbers)
        assert packed.shape == (-(-size // 2), 3)
        assert torch.equal(unpack_nibbles(packed, torch.empty_like(numbers)), numbers)


def test_an_encoded_map_is_near_the_recorded_one():
    """Half a unit of the last branch, whichever bits it has, and that of the difference more for the other one."""
    for (dtype, rounding), size in product(((torch.float32, 0.01), (torch.bfloat16, 1.5)), (64, 63, 100, 7)):
        rows = alike_branches(size).to(dtype)
        scale = rows.float().abs().amax((0, 1)) / LIMIT
        for bits in (8, 4):
            found = encode(rows, bits)
            unit, step = units_of(found, size)
            error = (found.whole().float() - rows.float()).abs() / scale
            assert (error[1] <= unit / 2 + rounding).all()
            assert (error[0] <= unit / 2 + step / 2 + rounding).all()
            assert found.integers().abs().max() <= 127
            at = torch.randint(0, size, (40,))
            assert torch.equal(found.rows(at), found.whole()[:, at])
            alone = encode(rows[-1:], bits)
            assert torch.equal(alone.rows(at), alone.whole()[:, at])


def test_branches_share_their_error():
    """So that guidance, which goes from one branch to the other, does not multiply it."""
    rows = alike_branches(change=0.02)
    error = encode(rows, 4).whole() - rows
    assert (error[0] - error[1]).norm() < 0.2 * error[1].norm()


def test_blocks_of_four_bits_have_units_of_their_own():
    """What is small in one part of a map is not lost beside what is large in another."""
    rows = alike_branches(4 * BLOCK)
    rows[:, BLOCK:] *= 0.05
    error = (encode(rows, 4).whole() - rows).abs()
    assert error[:, BLOCK:].mean() < 0.1 * error[:, :BLOCK].mean()


def test_in_8_bits_every_byte_is_that_of_the_published_reports():
    """Reports that are older than units in 4 bits read maps in 8 bits alone."""
    digest = sha256()
    shapes = ((torch.float32, 63, 2), (torch.float32, 256, 2), (torch.float32, 130, 1), (torch.float32, 64, 3))
    for seed, (dtype, size, branches) in enumerate(shapes):
        random = torch.Generator().manual_seed(seed)
        rows = torch.randint(-999, 1000, (branches, size, 24), generator=random).to(dtype)
        rows[:-1] = rows[-1:] + rows[:-1] / 8
        found, at = encode(rows, 8), torch.randint(0, size, (40,), generator=random)
        for tensor in (*found.tensors, found.whole(), found.rows(at)):
            digest.update(tensor.contiguous().numpy().tobytes())
    assert digest.hexdigest()[:16] == "8ed2357e238a4fe8"


def test_maps_that_were_written_before_they_had_units_are_made_again():
    found = encode(alike_branches(), 4)
    encoded = to_tensors({"conv": found})
    assert torch.equal(from_tensors(encoded)["conv"].whole(), found.whole())
    del encoded["conv/units"]
    with pytest.raises(LookupError):
        from_tensors(encoded)


def test_extremes_do_not_wrap_around():
    """Branches at opposite ends of a channel's range, constant maps, and zeros."""
    for bits in (8, 4):
        opposite = torch.tensor([1.0, -1.0]).view(2, 1, 1).expand(2, 8, 2) * torch.tensor([1.0, 1e-3])
        assert (encode(opposite, bits).whole() - opposite).abs().max() <= 0.2
        assert (encode(opposite, bits).whole().sign() == opposite.sign()).all()
        assert torch.equal(encode(torch.zeros(2, 4, 2), bits).whole(), torch.zeros(2, 4, 2))


def test_names_of_encodings():
    assert choose_encoding("auto", CPU).bits == 8 and choose_encoding("auto", torch.device("meta")).bits == 16
    assert {name: choose_encoding(name, CPU) for name in CACHE_DTYPES} == CACHE_DTYPES
    with pytest.raises(InputError, match="cache_dtype must be one of auto, int8, int4, model, got 'fp8'; use auto"):
        choose_encoding("fp8", CPU)


@torch.inference_mode()
def test_a_step_over_encoded_maps_is_that_over_their_numbers(pipelines, monkeypatch):
    """E4 with an encoded record: what is read is what it decodes to, by edits, by edits of edits and by graphs."""
    monkeypatch.setattr(tuning, "SMALL_MAP", 0)  # captured steps take the recorded statistics of small maps, too
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
        case.check(case.begin(GraphExecutor(case.executor)).step(0, case.batch(), TIME))
        assert all(torch.allclose(mine[name], theirs[name], atol=2e-3) for name in theirs)


@torch.inference_mode()
def test_a_step_over_encoded_rows_is_that_over_their_numbers(pipelines, monkeypatch):
    """The same of an edit's own rows."""
    monkeypatch.setattr(tuning, "SMALL_MAP", 0)
    for name, bits in product(("sd15", "shallow"), (8, 4)):
        case = Case(pipelines[name].unet, [grids(8, 9)["blobs"]])
        _, overlay = case.executor.run_sparse(
            case.latents[0], TIME, case.texts[0], {}, FeatureOverlay(case.maps, case.plans[0])
        )
        overlay.encode(FeatureEncoding(bits))
        decoded = FeatureOverlay(case.maps, overlay.plan, overlay.all_rows(), dict(overlay.statistics))
        assert overlay.joined and overlay.own_bytes < 0.45 * decoded.own_bytes
        given, over = (case.latents[0], TIME, case.texts[0], {}), (overlay, decoded)
        got, expected = (case.executor.run_sparse(*given, FeatureOverlay(each, case.plans[0]))[0] for each in over)
        assert torch.allclose(got, expected, atol=1e-5)
        case.maps = overlay
        case.check(case.begin(GraphExecutor(case.executor)).step(0, case.batch(), TIME))
