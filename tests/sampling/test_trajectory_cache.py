"""The trajectory cache: what it counts, what it drops first, and what goes with what lies beneath."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from fisedit import Editor
from fisedit.decoder.decode import DecoderCache
from fisedit.features.cache import StepFeatures
from fisedit.sampling.trajectory import Trajectory
from fisedit.sampling.trajectory_cache import TrajectoryCache
from tests.support.edit_trees import CORNER, NIGHT, QUICK, SQUARE, last_edit, same_pictures, session
from tests.support.edits import BIRD, CAT, DOG, Calls

SIZE = 400


def trajectory(**fields) -> Trajectory:
    """A trajectory that holds `SIZE` bytes."""
    return Trajectory(None, latents=[torch.zeros(SIZE // 4)], **fields)


@pytest.fixture
def cache():
    return TrajectoryCache(2 * SIZE)


def put(cache, *keys, base=None):
    for key in keys:
        cache.put(key, trajectory(), DecoderCache(StepFeatures(), Image.new("RGB", (0, 0))), base=base)


def test_a_trajectory_counts_all_that_is_not_its_sources():
    assert trajectory().own_bytes == SIZE and trajectory(start=1).own_bytes == 0


def test_what_fits_exactly_stays(cache):
    put(cache, "a", "b")
    assert "a" in cache and "b" in cache and cache.bytes == 2 * SIZE


def test_a_shared_trajectory_counts_once(cache):
    put(cache, "a")
    cache.share("a", "same")
    cache.share("gone", "none")
    assert "same" in cache and "none" not in cache and cache.bytes == SIZE


def test_what_was_used_least_goes_first_and_use_counts_for_what_lies_beneath():
    cache = TrajectoryCache(3 * SIZE)
    put(cache, "source")
    put(cache, "edit", base="source")
    put(cache, "other")
    cache.get("edit")
    put(cache, "new")
    assert [key for key in ("source", "edit", "other", "new") if key in cache] == ["source", "edit", "new"]


def test_room_is_made_before_it_is_needed():
    cache = TrajectoryCache(3 * SIZE)
    put(cache, "source")
    put(cache, "edit", base="source")
    put(cache, "other")
    cache.make_room(SIZE, "edit")
    assert "source" in cache and "edit" in cache and "other" not in cache
    cache.make_room(3 * SIZE, "edit")
    assert "source" in cache and "edit" in cache, "what is needed stays though there is no room"


def test_what_was_dropped_is_gone_and_what_was_never_there_is_no_error(cache):
    put(cache, "a", "b")
    cache.drop(["a", "never"])
    assert "a" not in cache and "b" in cache and cache.bytes == SIZE
    with pytest.raises(KeyError):
        cache.get("a")


@pytest.mark.parametrize("budget", [0, 6_000_000])
def test_what_was_dropped_is_rebuilt(pipelines, budget):
    """A budget for nothing, and one for about one source: the pictures do not depend on it."""
    roomy = session(Editor(pipelines["shallow"]))
    tight = session(Editor(pipelines["shallow"], max_recorded_bytes=budget))
    assert same_pictures(tight.history, roomy.history)
    assert tight._trajectory_cache.bytes < roomy._trajectory_cache.bytes
    assert same_pictures(last_edit(tight), last_edit(roomy))


def test_with_room_nothing_is_rebuilt(pipelines):
    editor = session(Editor(pipelines["shallow"]))
    with Calls(editor.pipe.unet) as calls:
        last_edit(editor)
    assert calls.dense == 0


def test_only_what_is_gone_is_rebuilt(pipelines):
    """A dense edit stands on its own: its source may be gone without harm."""
    editor = Editor(pipelines["shallow"], max_recorded_bytes=0)
    editor.generate(CAT, **QUICK)
    dense = editor.edit("a cat and a cake at night")
    with Calls(editor.pipe.unet) as calls:
        editor.edit(NIGHT, mask=SQUARE, growth=1)
        editor.checkout(dense.id)
        editor.edit(NIGHT, mask=CORNER, growth=1)
    assert (calls.dense, calls.sparse) == (0, 6)


def test_the_least_recently_used_source_goes_first(pipelines):
    editor = Editor(pipelines["shallow"])
    first = editor.generate(CAT, **QUICK)
    editor._trajectory_cache.max_bytes = int(2.5 * first.stats.recorded_bytes)
    second = editor.generate(DOG, **QUICK)
    editor.checkout(first.id)
    editor.edit(BIRD, mask=CORNER, growth=0)
    third = editor.generate(BIRD, **QUICK)
    kept = [result.id for result in (first, second, third) if result.id in editor._trajectory_cache]
    assert kept == [first.id, third.id]


def test_edits_of_one_source_go_before_it(pipelines):
    """Siblings are dropped one by one, the oldest first; what the last one lies over stays."""
    editor = Editor(pipelines["shallow"])
    source = editor.generate(CAT, **QUICK)
    first = editor.edit(BIRD, mask=CORNER, growth=0)
    editor._trajectory_cache.max_bytes = editor._trajectory_cache.bytes
    editor.checkout(source.id)
    second = editor.edit(DOG, mask=CORNER, growth=0)
    kept = [result.id for result in (source, first, second) if result.id in editor._trajectory_cache]
    assert kept == [source.id, second.id]


def test_a_result_outlives_what_was_recorded(pipelines):
    """An edit in hand keeps no features alive, and undo needs none."""
    editor = Editor(pipelines["shallow"], max_recorded_bytes=0)
    source = editor.generate(CAT, **QUICK)
    editor.generate(DOG, **QUICK)
    with Calls(editor.pipe.unet) as calls:
        assert editor.checkout(source.id) is source
    assert calls.dense == calls.sparse == 0 and source.id not in editor._trajectory_cache
