"""The decoder: remembering changes nothing, boxes cover the mask, and a boxed decode is a dense one up to its halo.

A random autoencoder sees much farther than a trained one, and its statistics matter more; so the machinery is proven
with rows and a halo that reach everywhere, where it must be exact, and the defaults only have to be better than less.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from fisedit.decoder import decode as decoding
from fisedit.decoder import tiles as boxing
from fisedit.decoder.compositing import composite
from fisedit.decoder.decode import decode, decode_sparse
from fisedit.decoder.tiles import (
    DILATION,
    HALO,
    Box,
    boxes,
)
from fisedit.sparse_kernels import prepacked, tuning
from tests.support import oracle
from tests.support.decodes import decode_into, each_grid, each_size, levels, pixels_of
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline

pytestmark = pytest.mark.usefixtures("no_grad")

FAR = 512


@pytest.fixture(scope="session")
def vae(pipelines):
    return pipelines["demo"].vae


@pytest.fixture(autouse=True)
def _boxed(request):
    """Boxes however large they are."""
    if "whole" not in request.node.name:
        request.getfixturevalue("boxed")


def random_latents(size, inside=None, seed=0):
    """The latents of a seed; with a grid, changed inside it."""
    make = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, 4, *size, generator=make)
    if inside is None:
        return latents
    return torch.where(torch.from_numpy(inside), latents + torch.randn(latents.shape, generator=make), latents)


def apart(got, expected, grid):
    """Differences of grey levels inside the grid."""
    return np.abs(levels(got) - levels(expected))[pixels_of(grid)]


@each_size
def test_a_dense_decode_is_diffusers_own(pipelines, vae, size):
    pipe, latents = pipelines["demo"], random_latents(size)
    image, _ = decode(vae, latents)
    expected = pipe.image_processor.postprocess(oracle.dense_decode(pipe, latents))[0]
    assert image.tobytes() == expected.tobytes() and image.size == expected.size


@pytest.mark.sweep(1)
@each_size
@each_grid
@pytest.mark.usefixtures("far")
def test_with_nothing_changed_boxes_give_the_source(vae, size, name):
    """Whatever is boxed, with all halo it needs and statistics that fit: a level of rounding apart at most."""
    grid, latents = grids(*size)[name], random_latents(size)
    source, record = decode(vae, latents)
    assert apart(decode_into(source, vae, latents, grid, record)[0], source, grid).max() <= 1


@pytest.mark.sweep(1)
@each_size
@each_grid
@pytest.mark.usefixtures("far")
def test_one_box_with_all_halo_is_a_dense_decode(vae, monkeypatch, size, name):
    """Changed latents all over the box: statistics and maps are those of the mixed maps, which here are all."""
    monkeypatch.setattr(decoding, "boxes", lambda grid: [Box(0, 0, *size)])
    monkeypatch.setattr(decoding, "cut", lambda grid, box, level: [box])
    grid = grids(*size)[name]
    source, record = decode(vae, random_latents(size))
    latents = random_latents(size, grid)
    dense, fresh = decode(vae, latents)
    got, kept = decode_into(source, vae, latents, grid, record)
    assert apart(got, composite(source, dense, grid), grid).max() <= 1
    for name_, sums in fresh.sums.items():
        assert torch.allclose(kept.sums[name_], sums, rtol=1e-3, atol=1e-2)
    for name_, rows in fresh.features.maps.items():
        level = 0 if name_.startswith("up_blocks.1") else 1
        assert torch.allclose(kept.features.whole(name_, level), rows, atol=1e-3)


@each_grid
def test_outside_the_mask_nothing_moves(vae, name):
    size, grid = (16, 16), grids(16, 16)[name]
    source, record = decode(vae, random_latents(size))
    before = source.tobytes()
    image = decode_into(source, vae, random_latents(size, grid), grid, record)[0]
    assert np.array_equal(levels(image)[~pixels_of(grid)], levels(source)[~pixels_of(grid)])
    assert apart(image, source, grid).max() > 3
    assert source.tobytes() == before and image.size == source.size and image.mode == "RGB"


@pytest.mark.parametrize(("name", "tolerance"), [("corner", 8), ("blobs", 20), ("square", 20)])
def test_a_boxed_decode_is_near_a_dense_one(vae, name, tolerance):
    """Mean grey levels inside the mask: 5, 13 and 18 apart where the edit itself moves 8, 29 and 33."""
    size, grid = (24, 16), grids(24, 16)[name]
    source, record = decode(vae, random_latents(size))
    latents = random_latents(size, grid)
    dense = composite(source, decode(vae, latents)[0], grid)
    near = apart(decode_into(source, vae, latents, grid, record)[0], dense, grid).mean()
    assert near < tolerance
    assert near < apart(source, dense, grid).mean()


@pytest.mark.usefixtures("far")
def test_an_edit_on_an_edit_starts_from_its_record(vae):
    """After an edit of everything, the source's record is stale and the edit's is not."""
    size, corner = (24, 16), grids(24, 16)["corner"]
    source, stale = decode(vae, random_latents(size))
    edited, kept = decode_into(source, vae, random_latents(size, seed=3), np.ones(size, bool), stale)
    latents = torch.where(torch.from_numpy(corner), random_latents(size, seed=4), random_latents(size, seed=3))
    dense = composite(edited, decode(vae, latents)[0], corner)
    near, far = (apart(decode_into(edited, vae, latents, corner, r)[0], dense, corner).mean() for r in (kept, stale))
    assert near < 0.5 * far


@pytest.mark.parametrize(("name", "default"), [("HALO", HALO), ("DILATION", DILATION)])
def test_farther_is_nearer(vae, monkeypatch, name, default):
    size, grid = (24, 16), grids(24, 16)["square"]
    source, record = decode(vae, random_latents(size))
    latents = random_latents(size, grid)
    dense, errors = composite(source, decode(vae, latents)[0], grid), []
    monkeypatch.setattr(boxing, {"HALO": "DILATION", "DILATION": "HALO"}[name], FAR)
    for cells in (default - 1, default, 2 * default, FAR):
        monkeypatch.setattr(boxing, name, cells)
        errors.append(apart(decode_into(source, vae, latents, grid, record)[0], dense, grid).mean())
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[1] > errors[-1]


def test_the_record_counts_its_bytes(vae):
    _, record = decode(vae, random_latents((16, 16)))
    maps = record.features
    tensors = (*record.sums.values(), *record.statistics.values(), *maps.maps.values(), *maps.statistics.values())
    assert record.own_bytes == sum(t.numel() * t.element_size() for t in tensors) + 3 * 128 * 128


def test_decoding_leaves_no_trace(vae):
    grid, latents = grids(16, 16)["square"], random_latents((16, 16))
    source, record = decode(vae, latents)
    decode_sparse(vae, random_latents((16, 16), grid), grid, record)
    assert not any("forward" in vars(module) for module in vae.modules())
    assert decode(vae, latents)[0].tobytes() == source.tobytes()


def test_boxes_dearer_than_half_a_decode_are_the_whole_frame(vae):
    """And then the decode is the dense one."""
    size, square = (16, 16), grids(64, 64)["square"]
    grid = np.pad(np.ones((14, 14), bool), 1)
    source, record = decode(vae, random_latents(size))
    latents = random_latents(size, grid)
    assert boxes(grid) == [Box(0, 0, 16, 16)]
    assert sum(box.area for box in boxes(square)) == square.sum()
    got = decode_into(source, vae, latents, grid, record)[0]
    assert apart(got, composite(source, decode(vae, latents)[0], grid), grid).max() <= 1


def test_a_decode_whose_products_are_widened(pipelines, monkeypatch):
    """On a CPU that multiplies faster in float32 no conv of the decoder is in bf16, and pictures are those of fp32."""
    vae, grid = pipelines["demo"].vae, grids(16, 16)["square"]
    old, new = random_latents((16, 16)), random_latents((16, 16), grid)
    plain, record = decode(vae, old)
    changed, _ = decode_into(plain, vae, new, grid, record)
    vae, seen, convolve = copy.deepcopy(vae).bfloat16(), set(), F.conv2d
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: True)
    monkeypatch.setattr(prepacked, "MIN_WIDENED_NUMEL", 0)
    monkeypatch.setattr(prepacked, "MIN_WIDENED_MACS", 0)
    monkeypatch.setattr(F, "conv2d", lambda x, w, *rest: seen.add((x.dtype, w.shape[:2])) or convolve(x, w, *rest))
    source, record = decode(vae, old.bfloat16())
    edited, _ = decode_into(source, vae, new.bfloat16(), grid, record)
    assert {shape for dtype, shape in seen if dtype is torch.bfloat16} <= {(4, 4)}  # before the decoder
    assert np.abs(levels(source) - levels(plain)).mean() < 2
    assert (levels(edited) == levels(source))[~pixels_of(grid)].all()
    assert apart(edited, changed, grid).mean() < 2 < apart(edited, source, grid).mean()


@pytest.mark.usefixtures("far")
def test_a_decoder_without_attention_is_decoded_so(monkeypatch):
    """As `mid_block_add_attention` of its config says."""
    size, grid = (16, 16), grids(16, 16)["square"]
    monkeypatch.setattr(decoding, "boxes", lambda grid: [Box(0, 0, *size)])
    monkeypatch.setattr(decoding, "cut", lambda grid, box, level: [box])
    vae = without_attention()
    source, record = decode(vae, random_latents(size))
    latents = random_latents(size, grid)
    got, _ = decode_into(source, vae, latents, grid, record)
    assert apart(got, composite(source, decode(vae, latents)[0], grid), grid).max() <= 1
    assert apart(got, source, grid).max() > 3


def without_attention():
    pipe = build_pipeline("shallow")
    vae = AutoencoderKL.from_config(dict(pipe.vae.config) | {"mid_block_add_attention": False})
    vae.load_state_dict(pipe.vae.state_dict(), strict=False)
    return vae.eval()
