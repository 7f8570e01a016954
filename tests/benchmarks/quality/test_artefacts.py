"""Planted faults are found by name, and a truth without one is clean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.quality.artefacts import Artefacts, EditedPicture, find_artefacts, is_seen
from benchmarks.quality.drawn_truth import DrawnTruth
from benchmarks.quality.edit_quality import find_classifier
from benchmarks.quality.scores import measure_artefacts
from benchmarks.scenes.layout import SceneChange
from benchmarks.scenes.scene import PlacedObject, Scene, render
from fisedit.bench.edit_case import BenchmarkEdit, MethodResult, make_case
from fisedit.bench.metrics import cells_to_pixels, pixels_to_cells
from fisedit.decoder.decode import decode
from fisedit.models.loader import load
from fisedit.models.vae import encode
from fisedit.sparse_kernels.dilation import dilate
from tests.support.quality import needs_font

pytestmark = needs_font

BOTH = Scene("grass", 17, (PlacedObject("owl", 2, 30, 12), PlacedObject("car", 18, 30, 12)))
DELETE = SceneChange("delete", BOTH, BOTH.without(1), 1)
INSERT = SceneChange("insert", BOTH.without(1), BOTH, 1)
OTHER = BOTH.change(1, word="cake")


@pytest.fixture(scope="module")
def classifier():
    found, missing = find_classifier("demo", None)
    if found is None:
        pytest.skip(missing[0])
    return found


def planted(change, pixels=None, classifier=None):
    """What is found in a picture of a change, by default the truth itself; the region is the car's and a cell."""
    before, after, car = render(change.before), render(change.after), render(BOTH).masks[1]
    thing = car if change is INSERT else np.zeros_like(car)
    edited = EditedPicture(after.pixels if pixels is None else pixels, before.pixels, dilate(pixels_to_cells(car), 1))
    return find_artefacts(edited, change, DrawnTruth(after.pixels, thing), classifier)


@pytest.mark.parametrize("change", [DELETE, INSERT])
def test_the_truth_is_clean(change, classifier):
    assert planted(change, None, classifier).verdict == "clean"


@pytest.mark.parametrize("change", [DELETE, INSERT])
def test_the_truth_through_the_autoencoder_is_clean_wherever_the_thing_stands(change, classifier):
    pipe = load("demo", device="cpu", dtype="fp32", local_files_only=True)
    after = change.after if change is DELETE else change.after.change(1, left=17, bottom=28)
    region = dilate(pixels_to_cells(render(BOTH).masks[1]), 2)
    pixels, before = render(after).pixels, Image.fromarray(render(change.before).pixels)
    with torch.inference_mode():
        shown = np.asarray(decode(pipe.vae, encode(pipe.vae, Image.fromarray(pixels)))[0])
    edit = BenchmarkEdit(change.kind, *change.prompts, before, is_global=False, change=change)
    case = make_case(pipe, edit, num_inference_steps=1, guidance_scale=4.0)
    composed = Image.fromarray(np.where(cells_to_pixels(region)[..., None], shown, pixels))
    assert measure_artefacts(case, MethodResult(composed, region, 0, 0), classifier).verdict == "clean"
    faulty = MethodResult(before, region, 0, 0)
    assert measure_artefacts(case, faulty, classifier).verdict == "bad"


@pytest.mark.parametrize("opacity", [0.15, 0.3])
def test_a_faint_old_thing_is_a_trace(opacity, classifier):
    before, after = (render(scene).pixels.astype(float) for scene in (DELETE.before, DELETE.after))
    found = planted(DELETE, np.uint8(before * opacity + after * (1 - opacity)), classifier)
    assert "trace" in found.seen and "old thing" not in found.seen


def test_a_whole_old_thing_is_there(classifier):
    found = planted(DELETE, render(DELETE.before).pixels, classifier)
    assert {"old thing", "trace"} <= set(found.seen) and found.verdict == "bad"


def test_an_outline_around_the_hole(classifier):
    pixels, car = render(DELETE.after).pixels.copy(), np.pad(render(BOTH).masks[1], 1)
    around = car[1:-1, 1:-1] & ~(car[:-2, 1:-1] & car[2:, 1:-1] & car[1:-1, :-2] & car[1:-1, 2:])
    pixels[around] = (50, 110, 45)
    found = planted(DELETE, pixels, classifier)
    assert "outline" in found.seen and found.strengths["outline"] == max(found.strengths.values())


def test_another_thing_in_the_hole(classifier):
    assert "wrong thing" in planted(DELETE, render(OTHER).pixels, classifier).seen
    found = planted(INSERT, render(OTHER).pixels, classifier)
    assert {"wrong thing", "missing", "broken"} <= set(found.seen)


def test_a_new_thing_cut_by_the_border(classifier):
    before, pixels = render(INSERT.before).pixels, render(INSERT.after).pixels.copy()
    border = 8 * 24
    painted = np.zeros((32, 32), bool)
    painted[15:31, 16:24] = True
    pixels[:, border:] = before[:, border:]
    truth = DrawnTruth(render(INSERT.after).pixels, render(BOTH).masks[1])
    found = find_artefacts(EditedPicture(pixels, before, painted), INSERT, None, classifier)
    assert "cut" in found.seen
    whole = EditedPicture(truth.pixels, before, painted)
    assert "cut" not in find_artefacts(whole, INSERT, truth, classifier).seen


def test_colour_two_cells_outside_the_region(classifier):
    pixels, region = render(DELETE.after).pixels.copy(), dilate(pixels_to_cells(render(BOTH).masks[1]), 1)
    outside = cells_to_pixels(dilate(region, 2) & ~dilate(region, 1))
    pixels[outside] = np.uint8(pixels[outside] * 0.85 + np.array((120, 60, 200)) * 0.15)
    found = planted(DELETE, pixels, classifier)
    assert "smear" in found.seen and "old thing" not in found.seen


def test_a_new_thing_that_fell_apart(classifier):
    pixels, car = render(INSERT.after).pixels.copy(), render(BOTH).masks[1]
    pixels[car] = np.roll(pixels, 40, axis=1)[car]
    assert "broken" in planted(INSERT, pixels, classifier).seen


def test_without_a_truth_or_a_classifier_less_is_measured():
    change = replace(DELETE)
    edited = EditedPicture(render(change.after).pixels, render(change.before).pixels, np.ones((32, 32), bool))
    assert dict(find_artefacts(edited, change, None, None).strengths) == {"cut": 0}


@pytest.mark.parametrize(
    ("strongest", "verdict"), [(0.0, "clean"), (0.5, "faint"), (0.99, "faint"), (1.0, "visible"), (2.5, "bad")]
)
def test_verdicts(strongest, verdict):
    found = Artefacts({"smear": strongest, "cut": 0.1})
    assert found.verdict == verdict and is_seen(verdict) is (found.seen == ("smear",))
