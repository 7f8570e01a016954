"""The ends of an edit by captured graphs: the same bits as without, each captured once."""

from __future__ import annotations

import pytest
import torch

from fisedit import Editor, ends
from fisedit.decode import decode, decode_boxes
from fisedit.ends import Ends
from tests.edits import BIRD, CAT, DOG
from tests.grids import grids
from tests.pipelines import build_pipeline

SIZE = 24
SQUARE, BLOBS, CORNER = (grids(SIZE, SIZE)[name] for name in ("square", "blobs", "corner"))
QUICK = {"seed": 7, "num_inference_steps": 2}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.fixture
def captured():
    return Ends(lambda device: True)


@pytest.fixture
def vae(pipelines):
    return pipelines["sd15"].vae


def check_records(got, expected):
    pairs = [(got.maps.maps, expected.maps.maps), (got.maps.totals, expected.maps.totals)]
    for mine, theirs in [*pairs, (got.sums, expected.sums), (got.totals, expected.totals)]:
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("grid", [SQUARE, BLOBS, CORNER], ids=["square", "blobs", "corner"])
def test_a_mask_that_comes_again_is_decoded_by_a_graph_bit_for_bit(captured, vae, grid):
    """Over one source, and over an edit of it."""
    source, record = decode(vae, torch.randn(1, 4, SIZE, SIZE))
    for made in (0, 1, 1, 1):
        latents = torch.randn(1, 4, SIZE, SIZE)
        expected, kept = decode_boxes(vae, latents, grid, record, source)
        got, mine = captured.decode(vae, latents, grid, record, source)
        assert got.tobytes() == expected.tobytes() and captured.decodes.made == made
        check_records(mine, kept)
    latents = torch.randn(1, 4, SIZE, SIZE)
    (expected, kept), (got, mine) = (f(vae, latents, grid, mine, got) for f in (decode_boxes, captured.decode))
    assert got.tobytes() == expected.tobytes() and captured.decodes.made == 1
    check_records(mine, kept)


def test_what_a_graph_gave_stays_when_it_is_replayed(captured, vae):
    source, record = decode(vae, torch.randn(1, 4, SIZE, SIZE))
    records = [captured.decode(vae, torch.randn(1, 4, SIZE, SIZE), SQUARE, record, source)[1] for _ in range(3)]
    before = {name: tensor.clone() for name, tensor in ends._tensors(records[1]).items()}
    captured.decode(vae, torch.randn(1, 4, SIZE, SIZE), SQUARE, record, source)
    assert all(torch.equal(ends._tensors(records[1])[name], tensor) for name, tensor in before.items())


def test_masks_come_and_go(captured, vae, monkeypatch):
    """A few graphs are kept; the one that was used least goes."""
    source, record = decode(vae, torch.randn(1, 4, SIZE, SIZE))
    latents = torch.randn(1, 4, SIZE, SIZE)
    captured.decodes._limit = 2
    for grid in (SQUARE, BLOBS, CORNER, SQUARE, BLOBS, SQUARE, CORNER, SQUARE):
        captured.decode(vae, latents, grid, record, source)
    assert captured.decodes.made == 3 and len(captured.decodes._kept) == 2
    captured.decode(vae, latents, BLOBS, record, source)
    assert captured.decodes.made == 4


def test_a_mask_that_is_nearly_everything_is_decoded_densely(captured, vae):
    source, record = decode(vae, torch.randn(1, 4, SIZE, SIZE))
    latents, grid = torch.randn(1, 4, SIZE, SIZE), grids(SIZE, SIZE)["all_but_one"]
    expected = decode_boxes(vae, latents, grid, record, source)[0]
    for _ in range(3):
        assert captured.decode(vae, latents, grid, record, source)[0].tobytes() == expected.tobytes()
    assert captured.decodes.made == 0


def test_a_decoder_that_was_changed_gets_a_graph_of_its_own(captured):
    with torch.inference_mode(mode=False):  # whose tensors do not count how often they are written
        vae = build_pipeline("sd15").vae
    source, record = decode(vae, torch.randn(1, 4, SIZE, SIZE))
    latents = torch.randn(1, 4, SIZE, SIZE)
    for _ in range(3):
        captured.decode(vae, latents, SQUARE, record, source)
    with torch.inference_mode(mode=False), torch.no_grad():
        vae.decoder.conv_out.weight.mul_(1.5)
    expected = decode_boxes(vae, latents, SQUARE, record, source)[0]
    for _ in range(3):
        assert captured.decode(vae, latents, SQUARE, record, source)[0].tobytes() == expected.tobytes()
    assert captured.decodes.made == 2


@pytest.mark.parametrize("prompt", [CAT, "a (cat:1.4) on a beach", "word " * 100])
def test_text_is_encoded_by_one_graph_bit_for_bit(pipelines, prompt):
    """Weighted words go through compel, which asks for more than a graph gives."""
    editors = [Editor(pipelines["sd15"], graphs=graphs) for graphs in (False, True)]
    recipe = editors[0].generate(CAT, **QUICK, negative_prompt=BIRD).recipe
    for text in (prompt, DOG, prompt):
        expected, got = (e._engine.encode(_with(recipe, text)) for e in editors)
        assert torch.equal(expected, got)
    assert editors[1]._engine.graphs.ends.texts.made == 1
    assert editors[0]._engine.graphs.ends.texts.made == 0


def test_text_may_be_encoded_outside_inference_mode(pipelines):
    editor = Editor(pipelines["sd15"], graphs=True)
    recipe = editor.generate(CAT, **QUICK).recipe
    with torch.inference_mode(mode=False):
        encoded = [editor._engine.encode(_with(recipe, prompt)) for prompt in (DOG, BIRD, DOG)]
    assert torch.equal(encoded[0], encoded[2]) and not torch.equal(encoded[0], encoded[1])


def _with(recipe, prompt):
    from dataclasses import replace

    return replace(recipe, prompt=prompt)


def test_the_editor_decodes_a_mask_that_comes_again_by_its_graph(pipelines):
    mask = grids(16, 16)["one_cell"]
    editor = Editor(pipelines["sd15"], graphs=True)
    source = editor.generate(CAT, **QUICK)
    pictures = []
    for prompt in (DOG, BIRD, DOG):
        editor.checkout(source.id)
        pictures.append(editor.edit(prompt, mask=mask, growth=1).image.tobytes())
    assert pictures[0] == pictures[2] != pictures[1]
    assert editor._engine.graphs.ends.decodes.made == 1
