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
from PIL import Image
from scipy.ndimage import distance_transform_edt

from fisedit.sparse import vae_decode as decoding
from fisedit.sparse import vae_tiles as boxing
from fisedit.sparse.compositing import BLEND_WIDTH, MAX_CORRECTION, composite
from fisedit.sparse.vae_decode import decode, decode_sparse
from fisedit.sparse.vae_tiles import (
    COARSE_LEVELS,
    DILATION,
    HALO,
    Box,
    box_areas,
    boxes,
    cut,
    frame_areas,
    upsampler_input,
    with_halo,
)
from fisedit.sparse_kernels import prepacked, tuning
from tests.support import oracle
from tests.support.grids import grids

pytestmark = pytest.mark.usefixtures("no_grad")

FAR = 512
SIZES = [(16, 16), (13, 17)]

each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
each_grid = pytest.mark.parametrize("name", grids(8, 8))


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


@pytest.mark.sweep(1)
@each_size
@each_grid
@pytest.mark.usefixtures("far")
def test_with_nothing_changed_boxes_give_the_source(vae, size, name):
    """Whatever is boxed, with all halo it needs and statistics that fit: a level of rounding apart at most."""
    grid, latents = grids(*size)[name], random_latents(size)
    source, record = decode(vae, latents)
    assert apart(decode_sparse(vae, latents, grid, record, source)[0], source, grid).max() <= 1


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
    got, kept = decode_sparse(vae, latents, grid, record, source)
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
    image = decode_sparse(vae, random_latents(size, grid), grid, record, source)[0]
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
    near = apart(decode_sparse(vae, latents, grid, record, source)[0], dense, grid).mean()
    assert near < tolerance
    assert near < apart(source, dense, grid).mean()


@pytest.mark.usefixtures("far")
def test_an_edit_on_an_edit_starts_from_its_record(vae):
    """After an edit of everything, the source's record is stale and the edit's is not."""
    size, corner = (24, 16), grids(24, 16)["corner"]
    source, stale = decode(vae, random_latents(size))
    edited, kept = decode_sparse(vae, random_latents(size, seed=3), np.ones(size, bool), stale, source)
    latents = torch.where(torch.from_numpy(corner), random_latents(size, seed=4), random_latents(size, seed=3))
    dense = composite(edited, decode(vae, latents)[0], corner)
    near, far = (apart(decode_sparse(vae, latents, corner, r, edited)[0], dense, corner).mean() for r in (kept, stale))
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
        errors.append(apart(decode_sparse(vae, latents, grid, record, source)[0], dense, grid).mean())
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[1] > errors[-1]


@pytest.mark.sweep(1)
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
    assert box_areas(np.ones((8, 8), bool)) == frame_areas(64)
    one, other = spots((5, 5)), spots((60, 60))
    both = [tuple(map(sum, zip(a, b, strict=True))) for a, b in zip(box_areas(one), box_areas(other), strict=True)]
    assert box_areas(one | other) == tuple(both)
    rows = [4**level * (2 + 2 * DILATION) ** 2 for level in range(COARSE_LEVELS)]
    alone = [(2 * 2**level + 2 * HALO) ** 2 for level in (2, 3)]
    assert [computed for _, computed in box_areas(spots((30, 30)))] == rows + alone


@each_size
@pytest.mark.parametrize("level", [2, 3])
def test_an_upsampler_sees_what_a_box_needs_and_has_it(size, level):
    """One cell around what is wanted behind it, within what was computed before it."""
    factor = 2**level
    for top, left in np.ndindex(*size):
        box = Box(top, left, min(top + 3, size[0]), min(left + 2, size[1]))
        frame = Box(0, 0, *size)
        before = with_halo(box, level - 1, size) if level > COARSE_LEVELS else frame.scaled(2 ** (COARSE_LEVELS - 1))
        outer = with_halo(box, level, size)
        seen, wanted = upsampler_input(outer).clipped(before), outer.grown(1).clipped(frame.scaled(factor))
        assert covers(seen.scaled(2), wanted)


def covers(one, other):
    return one.top <= other.top and one.left <= other.left and one.bottom >= other.bottom and one.right >= other.right


def test_a_box_is_cut_finer_where_cells_are_dear():
    """Two blobs that a halo of half a cell would join and one of a quarter would not."""
    grid = np.zeros((64, 64), bool)
    grid[5:7, 5:8] = grid[7:9, 8:11] = True
    (box,) = boxes(grid)
    pieces = cut(grid, box, 3)
    assert len(pieces) == 2 and sum(piece.area for piece in pieces) == grid.sum()


def test_box_arithmetic():
    box = Box(1, 2, 4, 8)
    assert box.area == 18
    assert box.scaled(2) == Box(2, 4, 8, 16)
    assert box.grown(2) == Box(-1, 0, 6, 10) and box.grown(2).clipped(Box(0, 0, 5, 9)) == Box(0, 0, 5, 9)
    assert box.coarsened(2) == Box(0, 1, 2, 4) and box.shape == (3, 6)
    assert box.within(Box(1, 1, 9, 9)) == Box(0, 1, 3, 7)


def plain(grey, size=128):
    return Image.new("RGB", (size, size), (grey,) * 3)


@pytest.mark.sweep(1)
@each_grid
@pytest.mark.parametrize("level", [30, 240])
def test_a_boundary_is_blended_up_to_a_limit(name, level):
    """Where the edit would show no step, none is left up to `MAX_CORRECTION`; deep inside nothing is touched."""
    grid = grids(16, 16)[name]
    mixed = levels(composite(plain(0), plain(level), grid))[..., 0].astype(int)
    depth = distance_transform_edt(np.pad(pixels_of(grid), 128, mode="edge"))[128:-128, 128:-128]
    if grid.all():
        assert (mixed == level).all()
        return
    assert (mixed[depth == 0] == 0).all() and (mixed[depth > BLEND_WIDTH] == level).all()
    first, second = (int(mixed[depth == k].min()) for k in (1, 2))
    assert 0 <= first - max(0, level - MAX_CORRECTION) <= MAX_CORRECTION / 3 and first <= second
    assert (mixed[depth > 0] >= level - MAX_CORRECTION).all() and (mixed <= level).all()


@each_grid
def test_a_composite_keeps_an_edit_that_fits(name):
    """Where the edited picture has the source's pixels outside, nothing is mended."""
    grid = grids(16, 16)[name]
    edited = Image.fromarray(np.where(pixels_of(grid)[..., None], levels(plain(240)), 20).astype(np.uint8))
    assert composite(plain(20), edited, grid).tobytes() == edited.tobytes()


def test_an_edge_of_the_edit_stays_an_edge():
    """The step that the edit has at the boundary is kept, led to the source's colours."""
    grid = grids(16, 16)["row"]
    edited = Image.fromarray(np.where(pixels_of(grid)[..., None], levels(plain(200)), 20).astype(np.uint8))
    mixed = levels(composite(plain(50), edited, grid))
    boundary = distance_transform_edt(pixels_of(grid)) == 1
    assert (abs(mixed[boundary].astype(int) - (50 + 180)) <= 8).all() and (mixed[~pixels_of(grid)] == 50).all()
    assert levels(composite(plain(0, 64), plain(240, 64), np.ones((8, 8), bool))).min() == 240


def test_nothing_is_composited_into_an_empty_mask():
    assert levels(composite(plain(20), plain(240), np.zeros((16, 16), bool))).max() == 20


def test_the_record_counts_its_bytes(vae):
    _, record = decode(vae, random_latents((16, 16)))
    maps = record.features
    tensors = (*record.sums.values(), *record.totals.values(), *maps.maps.values(), *maps.totals.values())
    assert record.own_bytes == sum(t.numel() * t.element_size() for t in tensors) > 0


def test_decoding_leaves_no_trace(vae):
    grid, latents = grids(16, 16)["square"], random_latents((16, 16))
    source, record = decode(vae, latents)
    decode_sparse(vae, random_latents((16, 16), grid), grid, record, source)
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
    got = decode_sparse(vae, latents, grid, record, source)[0]
    assert apart(got, composite(source, decode(vae, latents)[0], grid), grid).max() <= 1


def test_a_decode_whose_products_are_widened(pipelines, monkeypatch):
    """On a CPU that multiplies faster in float32 no conv of the decoder is in bf16, and pictures are those of fp32."""
    vae, grid = pipelines["demo"].vae, grids(16, 16)["square"]
    old, new = random_latents((16, 16)), random_latents((16, 16), grid)
    plain, record = decode(vae, old)
    changed, _ = decode_sparse(vae, new, grid, record, plain)
    vae, seen, convolve = copy.deepcopy(vae).bfloat16(), set(), F.conv2d
    monkeypatch.setattr(tuning, "prefers_fp32", lambda: True)
    monkeypatch.setattr(prepacked, "LARGE", 0)
    monkeypatch.setattr(prepacked, "MUCH", 0)
    monkeypatch.setattr(F, "conv2d", lambda x, w, *rest: seen.add((x.dtype, w.shape[:2])) or convolve(x, w, *rest))
    source, record = decode(vae, old.bfloat16())
    edited, _ = decode_sparse(vae, new.bfloat16(), grid, record, source)
    assert {shape for dtype, shape in seen if dtype is torch.bfloat16} <= {(4, 4)}  # before the decoder
    assert np.abs(levels(source) - levels(plain)).mean() < 2
    assert (levels(edited) == levels(source))[~pixels_of(grid)].all()
    assert apart(edited, changed, grid).mean() < 2 < apart(edited, source, grid).mean()
