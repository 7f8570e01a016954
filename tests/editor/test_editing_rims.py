"""Cells beside a mask by words: painted where the edit shows there, kept in sessions, and never in a given mask."""

from __future__ import annotations

import numpy as np
import pytest

from fisedit import Editor, Region
from fisedit.decoder import compositing
from fisedit.decoder import tiles as vae_tiles
from fisedit.sparse_kernels.dilation import dilate
from tests.support.edits import BIRD, CAT, DOG, check_outside, same
from tests.support.grids import grids
from tests.support.pictures import scene

QUICK = {"seed": 7, "num_inference_steps": 3}
SQUARE = grids(16, 16)["square"]


@pytest.fixture
def editor(model):
    return Editor.from_pretrained(model, device="cpu", dtype="fp32")


@pytest.fixture(params=["boxed", "whole"])
def _decoded(request, monkeypatch):
    """In boxes, however large they are, or as a whole."""
    if request.param == "boxed":
        monkeypatch.setattr(vae_tiles, "DENSE_SHARE", np.inf)
        monkeypatch.setattr(vae_tiles, "DENSE_CELLS", 0)


@pytest.mark.usefixtures("_decoded")
@pytest.mark.parametrize("opened", [False, True], ids=["generated", "opened"])
def test_an_edit_by_words_shows_beside_its_cells(editor, opened):
    source = editor.open(scene(128, 128), CAT, num_inference_steps=3) if opened else editor.generate(CAT, **QUICK)
    result = editor.edit(DOG, growth=1, verify=False)
    rim, cells = result.run.rim, result.latent_cells
    assert rim.any() and not (rim & ~dilate(cells, 1)).any() and np.array_equal(result.mask.grid, cells | rim)
    assert result.stats.mask_area == result.mask.area
    check_outside(editor, result, source)
    inside = np.kron(rim, np.ones((8, 8), bool))
    assert (np.asarray(result.image) != np.asarray(source.image))[inside].any()
    with pytest.raises(ValueError, match="read-only"):
        rim[:] = False


@pytest.mark.usefixtures("_decoded")
def test_what_was_recorded_is_made_again(editor, tmp_path):
    """Later edits read the same, whether it was kept, dropped or loaded."""
    editor.generate(CAT, **QUICK)
    result = editor.edit(DOG, growth=1, verify=False)
    expected = editor.edit(BIRD, growth=1, verify=False)
    editor.checkout(result.id)
    editor.save(tmp_path)
    editor.forget()
    again = Editor.resume(tmp_path, device="cpu")
    assert np.array_equal(again.current.run.rim, result.run.rim)
    for each in (editor, again):
        found = each.edit(BIRD, growth=1, verify=False)
        assert same(found, expected) and np.array_equal(found.run.rim, expected.run.rim)


def test_given_masks_and_frames_have_none(editor, monkeypatch):
    monkeypatch.setattr(compositing, "VISIBLE_CHANGE", 1e-9)
    source = editor.generate(CAT, **QUICK)
    for region in (Region.mask(SQUARE), Region.words().feather(1)):
        editor.checkout(source.id)
        result = editor.edit(DOG, region=region, growth=1)
        assert result.run.rim is None
        check_outside(editor, result, source)
    editor.checkout(source.id)
    assert editor.edit(DOG, growth=1, verify=False).run.rim.any()
