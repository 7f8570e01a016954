"""The ends of an edit by captured graphs: text to the same bits, decodes no farther from dense ones, by few graphs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.decoder import decode as decoding
from fisedit.decoder import norms as vae_norms
from fisedit.decoder import tiles as boxing
from fisedit.decoder.compositing import composite
from fisedit.decoder.decode import coarse_plan, decode, decode_sparse, paste
from fisedit.decoder.tiles import COARSE_LEVELS, Box, with_halo, with_padding
from fisedit.features.cache import recorded_statistics
from fisedit.features.sites import decoder_sites
from fisedit.runners import captured_decode
from fisedit.runners.captured_decode import CapturedDecoder
from fisedit.runners.graph_cache import GraphCache
from fisedit.runners.graph_capture import EagerGraph, ReplayMismatchError, check_replay
from fisedit.sparse_kernels import ops
from tests.support.edits import BIRD, CAT, DOG
from tests.support.grids import grids
from tests.support.pipelines import build_pipeline

pytestmark = pytest.mark.usefixtures("no_grad")

SIZE = 24
SQUARE, BLOBS, CORNER = (grids(SIZE, SIZE)[name] for name in ("square", "blobs", "corner"))
QUICK = {"seed": 7, "num_inference_steps": 2}


@pytest.fixture
def captured():
    return GraphCache(lambda device: True)


@pytest.fixture
def sd15_vae(pipelines):
    return pipelines["sd15"].vae


def graphs_of(captured):
    """How many graphs were made, of the coarse levels and of the fine ones."""
    (decoder,) = captured.decoders._kept.values()
    return counts(decoder)


def counts(decoder):
    """How many graphs are kept, of the coarse levels and of the fine ones."""
    kinds = [type(graph).__name__ for graph in decoder.graphs._kept.values()]
    return kinds.count("_CoarseGraph"), kinds.count("_FineGraph")


def check_coarse(got, expected):
    """What two decodes recorded of the coarse levels."""
    sites = {site.name: site for site in decoder_sites(build_pipeline("sd15").vae.decoder, COARSE_LEVELS)}
    sums = {name: recorded_statistics(expected.features, sites[name]) for name in got.features.statistics}
    for mine, theirs in ((got.features.maps, expected.features.maps), (got.features.statistics, sums)):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.allclose(mine[name], tensor, atol=1e-3, rtol=1e-4), name


def apart(got, expected, grid):
    """Mean difference of grey levels inside a grid."""
    inside = np.kron(grid, np.ones((8, 8), bool))
    return np.abs(np.asarray(got, int) - np.asarray(expected, int))[inside].mean()


sizes = pytest.mark.parametrize("size", [(24, 24), (13, 17)], ids=str)


@pytest.mark.sweep(1)
@pytest.mark.usefixtures("boxed", "far")
@sizes
@pytest.mark.parametrize("name", grids(8, 8))
def test_one_rectangle_with_all_halo_is_a_dense_decode(sd15_vae, monkeypatch, size, name):
    """Where everything is computed, and every pixel counts in the statistics, nothing is left of an error."""
    monkeypatch.setattr(vae_norms, "SAMPLE_STRIDE", 1)
    monkeypatch.setattr(decoding, "cut", lambda grid, box, level: [box])
    source, record = decode(sd15_vae, torch.randn(1, 4, *size))
    latents, grid = torch.randn(1, 4, *size), grids(*size)[name]
    dense, fresh = decode(sd15_vae, latents)
    decoder = CapturedDecoder(sd15_vae, size)
    decoded, kept = decoder.decode(latents, coarse_plan(sd15_vae, grid), grid, [Box(0, 0, *size)], record)
    got = composite(source, paste(decoded, kept)[0], grid)
    difference = np.abs(np.asarray(got, int) - np.asarray(composite(source, dense, grid), int))
    assert difference.max() <= 1 and counts(decoder) == (1, 2)
    for norm, sums in fresh.sums.items():
        assert torch.allclose(kept.sums[norm], sums, rtol=1e-3, atol=1e-2)
        assert torch.allclose(kept.statistics[norm], fresh.statistics[norm], rtol=1e-3, atol=1)


@pytest.mark.sweep(1)
@pytest.mark.usefixtures("boxed")
@sizes
@pytest.mark.parametrize("name", grids(8, 8))
def test_a_captured_decode_is_no_farther_from_a_dense_one(captured, sd15_vae, size, name):
    """Coarse rows are the same; rectangles have at least the halo of boxes; outside the mask nothing moves."""
    before, grid = torch.randn(1, 4, *size), grids(*size)[name]
    source, record = decode(sd15_vae, before)
    latents = torch.where(torch.from_numpy(grid), torch.randn(1, 4, *size), before)
    dense = composite(source, decode(sd15_vae, latents)[0], grid)
    (boxed, expected), (got, mine) = (
        (composite(source, picture, grid), kept)
        for picture, kept in (f(sd15_vae, latents, grid, record) for f in (decode_sparse, captured.decode))
    )
    assert apart(got, dense, grid) <= 1.05 * apart(boxed, dense, grid) + 0.05
    outside = ~np.kron(grid, np.ones((8, 8), bool))
    assert (np.asarray(got)[outside] == np.asarray(source)[outside]).all()
    if name != "everything":
        check_coarse(mine, expected)


def test_an_edit_on_an_edit(captured, sd15_vae):
    """Its record is an overlay over an overlay."""
    _, record = decode(sd15_vae, torch.randn(1, 4, SIZE, SIZE))
    for grid in (SQUARE, BLOBS, CORNER):
        latents = torch.randn(1, 4, SIZE, SIZE)
        _, expected = decode_sparse(sd15_vae, latents, grid, record)
        _, record = captured.decode(sd15_vae, latents, grid, record)
        check_coarse(record, expected)
        for name, sums in expected.sums.items():
            assert record.sums[name].shape == sums.shape


def test_a_new_mask_is_decoded_by_the_graphs_that_are_there(captured, sd15_vae):
    """Moved, or another within the same sides: nothing is captured, and nothing of the mask before stays."""
    _, record = decode(sd15_vae, torch.randn(1, 4, SIZE, SIZE))
    latents, made = torch.randn(1, 4, SIZE, SIZE), []
    masks = [np.roll(SQUARE, shift, (0, 1)) for shift in ((0, 0), (1, 0), (-3, 4), (5, 5))]
    masks.append(SQUARE & ~grids(SIZE, SIZE)["checkerboard"])
    pictures = []
    for grid in (*masks, *masks):
        pictures.append(captured.decode(sd15_vae, latents, grid, record)[0].tobytes())
        made.append(graphs_of(captured))
    assert made == [(1, 2)] * 10
    assert pictures[:5] == pictures[5:] and len(set(pictures)) == 5


@pytest.mark.slow
def test_by_tritons_kernels(sd15_vae, monkeypatch):
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setattr(boxing, "DENSE_SHARE", np.inf)
    monkeypatch.setattr(boxing, "DENSE_CELLS", 0)
    before, grid = torch.randn(1, 4, 8, 9), grids(8, 9)["one_cell"]
    _, record = decode(sd15_vae, before)
    latents, found = torch.where(torch.from_numpy(grid), torch.randn(1, 4, 8, 9), before), {}
    for name in ("reference", "fast", "triton"):
        with ops.use(name):
            plan, decoder = coarse_plan(sd15_vae, grid), CapturedDecoder(sd15_vae, (8, 9))
            decoded, cache = decoder.decode(latents, plan, grid, boxing.boxes(grid), record)
            found[name] = paste(decoded, cache)
    for name in ("fast", "triton"):
        difference = np.asarray(found[name][0], int) - np.asarray(found["reference"][0], int)
        assert np.abs(difference).max() <= 1
        check_coarse(found[name][1], found["reference"][1])


def test_what_a_graph_gave_stays_when_it_is_replayed(captured, sd15_vae):
    _, record = decode(sd15_vae, torch.randn(1, 4, SIZE, SIZE))
    _, kept = captured.decode(sd15_vae, torch.randn(1, 4, SIZE, SIZE), SQUARE, record)
    homes = kept.features.maps, kept.features.statistics, kept.sums, kept.statistics
    before = [{name: tensor.clone() for name, tensor in home.items()} for home in homes]
    captured.decode(sd15_vae, torch.randn(1, 4, SIZE, SIZE), SQUARE, record)
    assert all(torch.equal(home[name], t) for home, old in zip(homes, before, strict=True) for name, t in old.items())


def test_one_graph_too_many_drops_all_that_share_its_memory(captured, sd15_vae, monkeypatch):
    source, record = decode(sd15_vae, torch.randn(1, 4, SIZE, SIZE))
    latents = torch.randn(1, 4, SIZE, SIZE)
    captured.decode(sd15_vae, latents, SQUARE, record)
    (decoder,) = captured.decoders._kept.values()
    first, unlimited = list(decoder.graphs._kept.values()), GraphCache(lambda _: True)
    expected = [unlimited.decode(sd15_vae, latents, grid, record)[0] for grid in (CORNER, SQUARE, BLOBS)]
    monkeypatch.setattr(captured_decode, "MAX_GRAPHS", len(first))
    for grid, picture in zip((CORNER, SQUARE, BLOBS), expected, strict=True):
        again = captured.decode(sd15_vae, latents, grid, record)[0]
        assert same_pixels(composite(source, again, grid), composite(source, picture, grid))
        assert len(decoder.graphs) <= len(first)
    assert not any(graph is old for graph in decoder.graphs._kept.values() for old in first)


def same_pixels(one, other):
    return np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("limits", [(0, 0, 24, 24), (4, 6, 18, 20)])
@pytest.mark.parametrize("level", [2, 3])
def test_a_rectangle_holds_a_box_and_its_halo(level, limits):
    """Inside its limits, and there are few of them."""
    inside, seen = Box(*limits), set()
    for top, left in itertools.product(range(inside.top, inside.bottom), range(inside.left, inside.right)):
        for height, width in ((1, 1), (2, 5), (7, 3), (14, 14)):
            box = Box(top, left, min(top + height, inside.bottom), min(left + width, inside.right))
            outer = with_padding(box, level, inside)
            halo = with_halo(box, level, (24, 24))
            for low, high, length in ((outer.top, outer.bottom, 0), (outer.left, outer.right, 1)):
                first, last = (inside.top, inside.bottom) if not length else (inside.left, inside.right)
                needed = (halo.top, halo.bottom) if not length else (halo.left, halo.right)
                assert first <= low < high <= last
                assert low * 2**level <= max(needed[0], first * 2**level)
                assert high * 2**level >= min(needed[1], last * 2**level)
                seen.add(high - low)
    assert len(seen) <= 10


def test_a_mask_that_is_nearly_everything_is_decoded_densely(captured, sd15_vae):
    _, record = decode(sd15_vae, torch.randn(1, 4, SIZE, SIZE))
    latents, grid = torch.randn(1, 4, SIZE, SIZE), grids(SIZE, SIZE)["all_but_one"]
    expected = decode_sparse(sd15_vae, latents, grid, record)[0]
    assert captured.decode(sd15_vae, latents, grid, record)[0].tobytes() == expected.tobytes()
    assert captured.decoders.misses == 0


def test_a_decoder_that_was_changed_gets_graphs_of_its_own(captured):
    with torch.inference_mode(mode=False):  # whose tensors do not count how often they are written
        sd15_vae = build_pipeline("sd15").vae
    _, record = decode(sd15_vae, torch.randn(1, 4, SIZE, SIZE))
    latents = torch.randn(1, 4, SIZE, SIZE)
    before = captured.decode(sd15_vae, latents, SQUARE, record)[0]
    with torch.inference_mode(mode=False), torch.no_grad():
        sd15_vae.decoder.conv_out.weight.mul_(1.5)
    got, again = (captured.decode(sd15_vae, latents, SQUARE, record)[0] for _ in range(2))
    assert before.tobytes() != got.tobytes() == again.tobytes()
    assert captured.decoders.misses == 2


@pytest.mark.parametrize("prompt", [CAT, "a (cat:1.4) on a beach", "word " * 100])
def test_text_is_encoded_by_one_graph_bit_for_bit(pipelines, prompt):
    """Weighted words go through compel, which asks for more than a graph gives."""
    editors = [Editor(pipelines["sd15"], graphs=graphs) for graphs in (False, True)]
    config = editors[0].generate(CAT, **QUICK, negative_prompt=BIRD).config
    for text in (prompt, DOG, prompt):
        expected, got = (e._engine.encode(_with(config, text)).text for e in editors)
        assert torch.equal(expected, got)
    assert editors[1]._engine.graphs.cache.encoders.misses == 1
    assert editors[0]._engine.graphs.cache.encoders.misses == 0


def test_text_may_be_encoded_outside_inference_mode(pipelines):
    editor = Editor(pipelines["sd15"], graphs=True)
    config = editor.generate(CAT, **QUICK).config
    with torch.inference_mode(mode=False):
        encoded = [editor._engine.encode(_with(config, prompt)).text for prompt in (DOG, BIRD, DOG)]
    assert torch.equal(encoded[0], encoded[2]) and not torch.equal(encoded[0], encoded[1])


def _with(config, prompt):
    from dataclasses import replace

    return replace(config, prompt=prompt)


def test_the_editor_decodes_a_new_mask_by_the_graphs_of_another(pipelines, boxed):
    editor = Editor(pipelines["sd15"], graphs=True)
    source = editor.generate(CAT, **QUICK)
    made = []
    for shift in ((0, 0), (1, 2), (-2, 1), (0, 0)):
        editor.checkout(source.id)
        editor.edit(DOG, mask=np.roll(grids(16, 16)["square"], shift, (0, 1)), growth=1)
        made.append(graphs_of(editor._engine.graphs.cache))
    assert made == [(1, 2)] * 4
    first, *_, last = editor.history[1:]
    assert first.image.tobytes() == last.image.tobytes()


def broken(graph):
    raise RuntimeError("the driver says no")


def unsupported(graph):
    raise TypeError("the device has no float64")


def nan(graph):
    for output in graph.outputs.values():
        output.fill_(float("nan"))


FAULTS = pytest.mark.parametrize("replay", [broken, unsupported, nan], ids=lambda replay: replay.__name__)


@FAULTS
def test_a_decode_whose_first_replay_fails_or_differs_is_eager_from_then_on(captured, sd15_vae, monkeypatch, replay):
    _, record = decode(sd15_vae, torch.randn(1, 4, SIZE, SIZE))
    latents = torch.randn(1, 4, SIZE, SIZE)
    expected = decode_sparse(sd15_vae, latents, SQUARE, record)[0].tobytes()
    monkeypatch.setattr(EagerGraph, "replay", replay)
    with pytest.warns(RuntimeWarning, match="a captured graph was given up") as warned:
        pictures = [captured.decode(sd15_vae, latents, SQUARE, record)[0].tobytes() for _ in range(2)]
    assert pictures == [expected] * 2 and len(warned) == 1 and captured.reason


@FAULTS
def test_a_text_encoder_whose_first_replay_fails_or_differs_is_eager_from_then_on(pipelines, monkeypatch, replay):
    editor, plain = (Editor(pipelines["shallow"], graphs=graphs) for graphs in (True, False))
    expected = plain.generate(CAT, **QUICK).image.tobytes()
    monkeypatch.setattr(EagerGraph, "replay", replay)
    with pytest.warns(RuntimeWarning, match="a captured graph was given up"):
        result = editor.generate(CAT, **QUICK)
    assert result.image.tobytes() == expected
    with pytest.warns(RuntimeWarning, match="a captured graph was given up"):  # the UNet's
        edited = editor.edit(DOG, mask=SQUARE[:16, :16], growth=1)
    assert "a captured graph was given up" in edited.stats.uncaptured


def test_a_graphs_first_replay_is_compared_with_an_eager_run():
    eager = {"rows": torch.tensor([1.0, -2.0]), "none": torch.zeros(0)}
    check_replay({"rows": torch.tensor([1.019, -2.0]), "none": torch.zeros(0), "more": torch.zeros(1)}, eager)
    for rows in ([1.021, -2.0], [float("nan"), -2.0]):
        with pytest.raises(ReplayMismatchError, match="in rows, more than 0"):
            check_replay({"rows": torch.tensor(rows), "none": torch.zeros(0)}, eager)
    with pytest.raises(ReplayMismatchError, match="lacks none"):
        check_replay({"rows": eager["rows"]}, eager)
