"""The decoder: remembering changes nothing, boxes cover the mask, and a boxed decode is a dense one up to its halo.

A random autoencoder sees much farther than a trained one, and its statistics matter more; so the machinery is proven
with a halo that reaches everywhere, where it must be exact, and the default halo only has to be better than nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from fisedit import decode as decoding
from fisedit.decode import FEATHER, HALO, Box, box_areas, boxes, composite, decode, decode_boxes
from tests import oracle
from tests.grids import grids

FAR = (64, 128, 256, 512)
SIZES = [(16, 16), (13, 17)]

each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
each_grid = pytest.mark.parametrize("name", grids(8, 8))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def vae(pipelines):
    return pipelines["demo"].vae


@pytest.fixture
def far(monkeypatch):
    """A halo that reaches everywhere."""
    monkeypatch.setattr(decoding, "HALO", FAR)


def random_latents(size, inside=None, seed=0):
    """The latents of a seed; with a grid, changed inside it."""
    make = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, 4, *size, generator=make)
    if inside is None:
        return latents
    return torch.where(torch.from_numpy(inside), latents + torch.randn(latents.shape, generator=make), latents)


def levels(image):
    return np.asarray(image).astype(int)


def pixels_of(grid):
    return np.kron(grid, np.ones((8, 8), bool))


def apart(got, expected, grid):
    """Differences of grey levels inside the grid."""
    return np.abs(levels(got) - levels(expected))[pixels_of(grid)]


@each_size
def test_a_dense_decode_is_diffusers_own(pipelines, vae, size):
    pipe, latents = pipelines["demo"], random_latents(size)
    image, _ = decode(vae, latents)
    expected = pipe.image_processor.postprocess(oracle.dense_decode(pipe, latents))[0]
    assert image.tobytes() == expected.tobytes() and image.size == expected.size


@each_size
@each_grid
@pytest.mark.usefixtures("far")
def test_with_nothing_changed_boxes_give_the_source(vae, size, name):
    """Whatever is boxed, with all halo it needs and statistics that fit: a level of rounding apart at most."""
    grid, latents = grids(*size)[name], random_latents(size)
    source, record = decode(vae, latents)
    assert apart(decode_boxes(vae, latents, grid, record, source), source, grid).max() <= 1


@each_size
@each_grid
@pytest.mark.usefixtures("far")
def test_boxes_are_cut_out_of_the_whole(vae, size, name):
    """Changed latents: boxes with all halo they need are what one box over everything gives there."""
    grid = grids(*size)[name]
    source, record = decode(vae, random_latents(size))
    latents = random_latents(size, grid)
    whole = decode_boxes(vae, latents, np.ones(size, bool), record, source)
    expected = composite(source, whole, grid)
    assert apart(decode_boxes(vae, latents, grid, record, source), expected, grid).max() <= 1


@each_grid
def test_outside_the_mask_nothing_moves(vae, name):
    size, grid = (16, 16), grids(16, 16)[name]
    source, record = decode(vae, random_latents(size))
    before = source.tobytes()
    image = decode_boxes(vae, random_latents(size, grid), grid, record, source)
    assert np.array_equal(levels(image)[~pixels_of(grid)], levels(source)[~pixels_of(grid)])
    assert apart(image, source, grid).max() > 3
    assert source.tobytes() == before and image.size == source.size and image.mode == "RGB"


@pytest.mark.parametrize(("name", "tolerance"), [("corner", 8), ("blobs", 20), ("square", 20)])
def test_a_boxed_decode_is_near_a_dense_one(vae, name, tolerance):
    """Mean grey levels inside the mask: 3, 12 and 17 apart where the edit itself moves 6, 22 and 27. Most of it is the
    source's statistics, which no halo mends."""
    size, grid = (24, 16), grids(24, 16)[name]
    source, record = decode(vae, random_latents(size))
    latents = random_latents(size, grid)
    dense = composite(source, decode(vae, latents)[0], grid)
    near = apart(decode_boxes(vae, latents, grid, record, source), dense, grid).mean()
    assert near < tolerance
    assert near < apart(source, dense, grid).mean()


def test_a_wider_halo_is_nearer(vae, monkeypatch):
    size, grid = (24, 16), grids(24, 16)["square"]
    latents = random_latents(size)
    source, record = decode(vae, latents)
    errors = []
    for factor in (0, 1, 2, 16):
        monkeypatch.setattr(decoding, "HALO", tuple(factor * halo for halo in HALO))
        errors.append(apart(decode_boxes(vae, latents, grid, record, source), source, grid).mean())
    assert errors == sorted(errors, reverse=True) and errors[0] > 2 * errors[1] > errors[-1]


@each_size
@each_grid
def test_boxes_cover_the_mask_and_only_where_it_is(size, name):
    grid, covered = grids(*size)[name], np.zeros(size, bool)
    for box in boxes(grid):
        assert grid[box.slices].any()
        assert 0 <= box.top < box.bottom <= size[0] and 0 <= box.left < box.right <= size[1]
        assert not (covered[box.slices] & grid[box.slices]).any()
        covered[box.slices] = True
    assert covered[grid].all()


def spots(*cells, size=(64, 64)):
    grid = np.zeros(size, bool)
    for y, x in cells:
        grid[y : y + 2, x : x + 2] = True
    return grid


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (spots((5, 5)), {Box(5, 5, 7, 7)}),
        (spots((5, 5), (60, 60)), {Box(5, 5, 7, 7), Box(60, 60, 62, 62)}),
        (spots((5, 5), (5, 8)), {Box(5, 5, 7, 10)}),
        (spots((5, 5), (7, 7)), {Box(5, 5, 9, 9)}),
        (np.zeros((8, 8), bool), set()),
        (np.ones((8, 8), bool), {Box(0, 0, 8, 8)}),
    ],
    ids=["one", "far apart", "near", "touching", "nothing", "everything"],
)
def test_boxes_are_cut_where_that_is_cheaper(grid, expected):
    assert set(boxes(grid)) == expected


def test_areas_count_every_box_with_its_halo():
    assert box_areas(np.ones((8, 8), bool)) == (64, 256, 1024, 4096)
    one, other = spots((5, 5)), spots((60, 60))
    both = tuple(a + b for a, b in zip(box_areas(one), box_areas(other), strict=True))
    assert box_areas(one | other) == both
    assert box_areas(spots((30, 30)))[0] == (2 + 2 * HALO[0]) ** 2


def test_box_arithmetic():
    box = Box(1, 2, 4, 8)
    assert box.area == 18
    assert box.scaled(2) == Box(2, 4, 8, 16)
    assert box.grown(2, 5, 9) == Box(0, 0, 5, 9)
    assert box.within(Box(1, 1, 9, 9)) == Box(0, 1, 3, 7)


@each_grid
def test_a_composite_fades_in_inside_the_rim(name):
    grid = grids(16, 16)[name]
    old, new = (Image.new("RGB", (128, 128), (grey,) * 3) for grey in (0, 250))
    mixed = levels(composite(old, new, grid))[..., 0]
    assert (mixed[~pixels_of(grid)] == 0).all()
    assert (mixed[pixels_of(grid)] >= 250 / (FEATHER + 1)).all()
    assert mixed.max() >= 250 * FEATHER / (FEATHER + 1)


def test_a_feather_is_as_wide_as_it_says():
    old, new = (Image.new("RGB", (64, 64), (grey,) * 3) for grey in (0, 250))
    row = levels(composite(old, new, grids(8, 8)["row"]))[32:40, 30, 0]
    assert row.tolist() == [50, 100, 150, 200, 200, 150, 100, 50]
    corner = np.zeros((8, 8), bool)
    corner[:4, :4] = True  # the frame's border is no rim
    assert levels(composite(old, new, corner))[0, [0, 26, 27, 28, 31, 32], 0].tolist() == [250, 250, 250, 200, 50, 0]
    assert levels(composite(old, new, np.ones((8, 8), bool))).min() == 250


def test_the_record_counts_its_bytes(vae):
    _, record = decode(vae, random_latents((16, 16)))
    tensors = (*record.moments.values(), *record.tokens.values())
    assert record.own_bytes == sum(t.numel() * t.element_size() for t in tensors) > 0


def test_decoding_leaves_no_trace(vae):
    grid, latents = grids(16, 16)["square"], random_latents((16, 16))
    source, record = decode(vae, latents)
    decode_boxes(vae, random_latents((16, 16), grid), grid, record, source)
    assert not any("forward" in vars(module) for module in vae.modules())
    assert decode(vae, latents)[0].tobytes() == source.tobytes()
