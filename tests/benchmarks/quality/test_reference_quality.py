"""Edits that take a look: distances with known answers, edits with known truth, and an adapter that changes nothing."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from PIL import Image

from benchmarks.quality import reference_edits, reference_quality
from benchmarks.quality.scene_edits import known_words
from benchmarks.settings import ReferenceQualitySettings
from fisedit.adapters.row_column.checkpoints import fresh_adapter, save_adapter
from fisedit.errors import InputError
from fisedit.models.loader import load
from tests.support.quality import needs_font

SIDE = 128


def whole(pixels) -> reference_quality.MaskedObject:
    pixels = np.asarray(pixels, np.uint8)
    return pixels, np.ones(pixels.shape[:2], bool)


def flat(*colour: int) -> reference_quality.MaskedObject:
    return whole(np.full((16, 16, 3), colour))


def test_black_is_a_hundred_from_white():
    for measure in (reference_quality.colour_distance, reference_quality.histogram_distance):
        assert measure(None, flat(0, 0, 0), flat(255, 255, 255)) == pytest.approx(100, abs=0.01)
        assert measure(None, flat(0, 0, 0), flat(0, 0, 0)) == 0


def test_a_spread_is_seen_where_the_mean_is_the_same():
    """Half black and half white, wherever they lie, against the grey between: 50 away for every pixel."""
    split = np.zeros((16, 16, 3), np.uint8)
    split[:8] = 255
    grey = flat(119, 119, 119)  # L = 50
    assert reference_quality.colour_distance(None, whole(split), grey) < 0.2
    assert reference_quality.histogram_distance(None, whole(split), grey) == pytest.approx(50, abs=0.6)
    assert reference_quality.histogram_distance(None, whole(split), whole(split.transpose(1, 0, 2))) < 1e-6


def test_what_lies_around_a_thing_does_not_count(judge):
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(2))
    thing = np.zeros((SIDE, SIDE), bool)
    thing[40:90, 30:80] = True
    second[thing] = first[thing]
    assert all(abs(far) < 1e-6 for far in reference_quality.distances(judge, (first, thing), (second, thing)).values())
    assert all(far > 1e-4 for far in reference_quality.distances(judge, (first, thing), (first, ~thing)).values())


@pytest.fixture(scope="module")
def demo_words():
    """What the demo model's tokenizer knows as one token."""
    return known_words(load("demo", device="cpu", dtype="fp32"))


@needs_font
def test_edits_show_the_look_in_the_reference_alone(demo_words):
    for seed in range(6):
        edit = reference_edits.sample_reference_edit(
            np.random.default_rng(seed), SIDE, demo_words, np.copy, same=bool(seed % 2)
        )
        old, new = (scene.objects[0].word for scene in (edit.change.before, edit.change.after))
        assert old in edit.change.prompts[0] and new in edit.change.prompts[1] and old != new
        assert (edit.inside | ~edit.object_mask).all() and edit.object_mask.any() and edit.reference_mask.any()
        moved = reference_quality.colour_distance(
            None, (edit.target, edit.object_mask), (edit.picture, edit.object_mask)
        )
        assert moved > 3
        hues = [np.asarray(Image.fromarray(p).convert("HSV"))[mask] for p, mask in _things(edit)]
        assert abs(np.median(hues[0][:, 1].astype(int)) - np.median(hues[1][:, 1].astype(int))) < 12


def _things(edit):
    return (edit.target, edit.object_mask), (edit.reference, edit.reference_mask)


@needs_font
def test_looks_that_cannot_be_painted_are_not_asked_for(demo_words):
    tried = []

    def again(pixels, *, fails):
        tried.append(pixels)
        return np.zeros_like(pixels) if len(tried) <= fails else pixels

    edit = reference_edits.sample_reference_edit(
        np.random.default_rng(3), SIDE, demo_words, partial(again, fails=2), same=True
    )
    assert len(tried) > 2 and np.array_equal(edit.target, tried[-1])


@needs_font
def test_an_adapter_that_adds_nothing_brings_nothing_nearer(judge_file, tmp_path):
    unet = load("demo", device="cpu", dtype="fp32").unet
    save_adapter(fresh_adapter(unet, "v5"), tmp_path / "adapter")
    steps = []
    settings = ReferenceQualitySettings(
        adapter=str(tmp_path / "adapter"), edits=2, num_inference_steps=2, classifier=judge_file, html=tmp_path
    )
    told = reference_quality.measure_reference_quality(settings, lambda i, n, _: steps.append((i, n)))
    assert steps == [(0, 2), (1, 2)] and json.loads(json.dumps(told)) == {**told, "notes": list(told["notes"])}
    assert all(edit["with"] == edit["without"] and edit["with"]["exact"] for edit in told["edits"])
    assert all(row["closer"] == f"0 of {row['edits']}" and row["exact outside"] == "100%" for row in told["summary"])
    assert Image.open(tmp_path / "references.png").size == (
        5 * 8 * unet.config.sample_size,
        2 * 8 * unet.config.sample_size,
    )


def test_a_model_without_a_judge_is_refused(monkeypatch):
    monkeypatch.setattr(reference_quality, "find_classifier", lambda model, path: (None, ("there is none",)))
    with pytest.raises(InputError, match="there is none; name one"):
        reference_quality.measure_reference_quality(ReferenceQualitySettings(adapter="demo", edits=1))


def test_the_command_hands_everything_on(study, monkeypatch, tmp_path):
    told, asked = {"summary": [{"distance": "colour", "closer": "3 of 4"}], "notes": ["a note"]}, []
    measure = "measure_reference_quality"
    monkeypatch.setattr(reference_quality, measure, lambda settings, _: asked.append(settings) or told)
    arguments = ["--adapter", "demo", "--edits", "4", "--output", str(tmp_path / "report.json")]
    run = study("quality", *arguments)
    assert run.status == 0
    assert asked == [ReferenceQualitySettings(adapter="demo", edits=4)] and asked[0].guidance_scale == 4.0
    written = json.loads((tmp_path / "report.json").read_text())
    assert written.pop("environment") and written == told
    assert "3 of 4" in (said := run.out) and "note: a note" in said
