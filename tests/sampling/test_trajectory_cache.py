"""The trajectory cache: what it counts, what it drops first, and what goes with what lies beneath."""

from __future__ import annotations

import pytest
import torch

from fisedit.sampling.trajectory import Trajectory
from fisedit.sampling.trajectory_cache import TrajectoryCache
from fisedit.sparse.feature_cache import StepFeatures
from fisedit.sparse.vae_decode import DecoderCache

SIZE = 400


def trajectory(**fields) -> Trajectory:
    """A trajectory that holds `SIZE` bytes."""
    return Trajectory(None, latents=[torch.zeros(SIZE // 4)], **fields)


@pytest.fixture
def cache():
    return TrajectoryCache(2 * SIZE)


def put(cache, *keys, base=None):
    for key in keys:
        cache.put(key, trajectory(), DecoderCache(StepFeatures()), base=base)


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


def test_what_was_dropped_is_gone_and_what_was_never_there_is_no_error(cache):
    put(cache, "a", "b")
    cache.drop(["a", "never"])
    assert "a" not in cache and "b" in cache and cache.bytes == SIZE
    with pytest.raises(KeyError):
        cache.get("a")
