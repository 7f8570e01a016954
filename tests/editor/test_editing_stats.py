"""What an edit says about itself: multiply-accumulates as torch counts them, bytes, evaluations, notes."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.costs.macs import decoder_macs, text_macs
from fisedit.costs.pace import Pace
from fisedit.decoder.tiles import box_areas, frame_areas
from fisedit.sampling import denoise
from fisedit.sampling.engine import Engine
from fisedit.values import DENSE_GROWTH, ActiveCells, EditStats, MaskSource, Step, as_dilations
from tests.support.edits import BIRD, CAT, DOG, Calls, config_of, record, unwatched
from tests.support.grids import grids
from tests.support.macs import counted, time_macs
from tests.support.pipelines import SHAPES

HEIGHT, WIDTH = 13, 17
SQUARE = grids(16, 16)["square"]
QUICK = {"seed": 7, "num_inference_steps": 3}


def test_an_edit_costs_its_steps_its_text_and_its_decode(pipelines):
    pipe = pipelines["demo"]
    editor = Editor(pipe)
    editor.generate(CAT, **QUICK)
    stats = editor.edit(DOG, mask=SQUARE, growth=(2, 1, 0)).stats
    costs = Engine(pipe).costs(config_of(num_inference_steps=3))
    steps = sum(costs.sparse_step(SQUARE, growth) for growth in (2, 1, 0))
    sites = editor._engine.executor.sites
    assert stats.macs == steps + text_macs(sites, 2, 77) + decoder_macs(pipe.vae, box_areas(SQUARE), 256)
    assert stats.macs_dense == 3 * costs.dense_step() + decoder_macs(pipe.vae, frame_areas(256), 256)
    assert stats.macs < 0.6 * stats.macs_dense


@pytest.mark.parametrize(("negative", "known"), [("", 1), ("a cake", 0)])
def test_a_fallback_costs_what_torch_counts(pipelines, negative, known):
    """Half of its first step is its source's, where that was made with the same negative prompt."""
    engine, config = Engine(pipelines["demo"]), config_of(DOG, num_inference_steps=3, negative_prompt=negative)
    source = record(engine, replace(config, prompt=CAT, negative_prompt=""))
    with torch.inference_mode():
        text = engine.encode(config)
    torchs = counted(lambda: denoise.run_dense(engine, config, text, unwatched, (ActiveCells(SQUARE), source)))
    costs, time = engine.costs(config), time_macs(engine.pipe.unet, 1)
    steps = 3 * costs.sparse_step(SQUARE, Step.DENSE) - known * costs.branch()
    assert torchs - (6 - known) * time == steps + text_macs(engine.executor.sites, 2, 77)
    assert (engine.unconditional(source, config, text, 0) is not None) == bool(known)


def tensors(trajectory):
    loose = [*trajectory.latents, *trajectory.predictions, *trajectory.text_keys.values()]
    return loose + [t for step in trajectory.features for t in (*step.maps.values(), *step.statistics.values())]


@pytest.mark.parametrize("shape", SHAPES)
def test_recorded_bytes_are_those_of_the_tensors(pipelines, shape):
    """A source's, and an edit's own without its parent's."""
    editor = Editor(pipelines[shape])
    source = editor.generate(CAT, **QUICK)
    edit = editor.edit(DOG, mask=SQUARE, growth=1)
    for result in (source, edit):
        trajectory, decoder = editor._trajectory_cache.get(result.id)
        expected = sum(t.numel() * t.element_size() for t in tensors(trajectory)) + decoder.own_bytes
        assert result.stats.recorded_bytes == expected > 0
    assert editor._trajectory_cache.bytes == source.stats.recorded_bytes + edit.stats.recorded_bytes
    assert edit.stats.recorded_bytes < source.stats.recorded_bytes


EDITS = {
    "sparse": (DOG, {"mask": SQUARE, "growth": 1}),
    "dense": ("a cat and a cake at night", {}),
    "blended": ("a cat and a cake at night", {"protect": SQUARE}),
    "nothing": (CAT, {}),
}


@pytest.mark.parametrize("case", EDITS)
@pytest.mark.usefixtures("source")
def test_stats_are_json(editor, case):
    prompt, options = EDITS[case]
    stats = editor.edit(prompt, **options).stats
    plain = json.loads(json.dumps(stats.as_dict()))
    assert list(plain) == [field.name for field in fields(EditStats)]
    assert plain["mask_source"] == stats.mask_source and plain["mask_area"] == stats.mask_area
    assert all(type(n) is int for n in (stats.macs, stats.macs_dense, stats.recorded_bytes, *stats.active_rows))


@pytest.mark.parametrize("case", EDITS)
@pytest.mark.usefixtures("source")
def test_evaluations_are_those_that_ran(editor, case):
    prompt, options = EDITS[case]
    with Calls(editor.pipe.unet) as calls:
        stats = editor.edit(prompt, **options).stats
    assert (stats.unet_evaluations_dense, stats.unet_evaluations_sparse) == (calls.dense, calls.sparse)
    assert (calls.dense, calls.sparse) == {"sparse": (0, 3), "nothing": (0, 0)}.get(case, (3, 0))
    assert bool(stats.fallback) is (case in ("dense", "blended"))
    stations = {"text", "mask", "plan", "denoise", "decode", "total"}
    assert set(stats.seconds) == ({"total"} if case == "nothing" else stations)
    assert all(seconds >= 0 for seconds in stats.seconds.values())


@pytest.mark.usefixtures("source")
def test_a_generation_says_what_it_did(editor):
    stats = editor.current.stats
    assert (stats.unet_evaluations_dense, stats.unet_evaluations_sparse) == (3, 0)
    assert (stats.mask_source, stats.mask_area, stats.mask_confidence) == (MaskSource.EVERYWHERE, 1.0, 1.0)
    assert stats.active_rows == (256, 64, 16) and stats.macs == stats.macs_dense > 0
    assert not stats.fallback and not stats.notes and not stats.growth


def test_a_rebuild_is_told(pipelines):
    """Dense evaluations that only rebuild what was dropped are evaluations all the same."""
    editor = Editor(pipelines["shallow"], max_recorded_bytes=0)
    source = editor.generate(CAT, **QUICK)
    editor.generate(BIRD, **QUICK)
    editor.checkout(source.id)
    with Calls(editor.pipe.unet) as calls:
        stats = editor.edit(DOG, mask=SQUARE, growth=1).stats
    assert (calls.dense, calls.sparse) == (3, 3)
    assert stats.notes == ("results rebuilt first, as their features were gone: 1",)


LONG = "a cat and a cake on a beach with a tree and a house " * 50


@pytest.mark.parametrize("call", ["generate", "edit", "dense"])
@pytest.mark.usefixtures("source")
def test_a_truncated_prompt_is_told(editor, call):
    calls = {
        "generate": lambda: editor.generate(LONG, **QUICK),
        "edit": lambda: editor.edit(LONG, mask=SQUARE, growth=1),
        "dense": lambda: editor.edit(LONG, mask=np.ones((16, 16), bool)),
    }
    note, *why_dense = calls[call]().stats.notes
    assert len(why_dense) == (call == "dense")
    assert note == "the prompt is longer than 8 chunks of 75 tokens, and the rest is not read; shorten it"


@pytest.mark.usefixtures("source")
def test_words_beyond_reach_change_nothing_and_say_so(editor):
    editor.generate(LONG, **QUICK)
    (note,) = editor.edit(LONG + "snow").stats.notes
    assert note == "nothing was edited: only words beyond the text encoder's reach changed"


@pytest.mark.usefixtures("source")
def test_active_rows_are_the_widest_growths(editor):
    stats = editor.edit(DOG, mask=grids(16, 16)["corner"], growth=(0, 3, 1)).stats
    assert stats.active_rows == (25, 9, 4) and stats.growth == (0, 3, 1)
    assert stats.mask_area == 4 / 256


def test_dense_steps_in_between_are_told(pipelines):
    editor = Editor(pipelines["demo"])
    editor.generate(CAT, num_inference_steps=5)
    widths = (1, DENSE_GROWTH, 1, DENSE_GROWTH, 1)
    with Calls(editor.pipe.unet) as seen:
        result = editor.edit(DOG, mask=SQUARE, growth=widths)
    stats, costs = result.stats, Engine(editor.pipe).costs(result.config)
    assert (seen.dense, seen.sparse) == (stats.unet_evaluations_dense, stats.unet_evaluations_sparse) == (2, 3)
    assert stats.growth == widths and stats.active_rows == costs.rows(SQUARE, (1,))
    assert costs.dense_step() > costs.sparse_step(SQUARE, Step.DENSE) > costs.sparse_step(SQUARE, 1)
    assert stats.macs == costs.sparse(SQUARE, as_dilations(widths))
    assert not result.stats.fallback


def test_seconds_are_predicted_by_the_last_run(pipelines):
    """Without a table the next run like it takes as long, and a part of it less; no schedule depends on that."""
    editor = Editor(pipelines["demo"])
    source = editor.generate(CAT, **QUICK)
    first = editor.preview(DOG, mask=SQUARE)
    assert first.seconds_dense == pytest.approx(source.stats.seconds["total"])
    assert 0.1 * first.seconds_dense < first.seconds < first.seconds_dense
    edit = editor.edit(DOG, mask=SQUARE)
    editor.checkout(source.id)
    again = editor.preview(DOG, mask=SQUARE)
    assert again.seconds == pytest.approx(edit.stats.seconds["total"])
    for pace in (1e-20, 1e9):
        editor._engine.pace = Pace(dense=(pace,), sparse=(pace,))
        editor.checkout(source.id)
        assert editor.edit(DOG, mask=SQUARE).run.dilation == edit.run.dilation
