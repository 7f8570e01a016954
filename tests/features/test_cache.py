"""Recorded features: the bytes an overlay holds, and which maps a shifted step has."""

from __future__ import annotations

import torch

from fisedit.features.cache import (
    FeatureDelta,
    FeatureOverlay,
    ShiftedFeatures,
    StepFeatures,
    recorded_statistics,
    shifted,
)
from fisedit.features.codec import AS_RECORDED, FeatureEncoding
from fisedit.features.sites import LayerSite, Role
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support.grids import grids


def alike(size, channels):
    """Two branches [2, size, channels] that differ little."""
    return torch.randn(1, size, channels) + 0.1 * torch.randn(2, size, channels)


def test_an_overlay_counts_what_it_holds_and_not_its_parent():
    parent = StepFeatures({"map": torch.zeros(1, 64, 8)})
    rows = torch.zeros(1, 16, 8)
    overlay = FeatureOverlay(parent, make_row_plan(grids(8, 8)["square"], 1), {"map": rows})
    assert overlay.own_bytes == 4 * rows.numel()
    overlay.share = 2
    assert overlay.own_bytes == 2 * rows.numel()


def test_encoded_rows_leave_the_memory_that_edits_share():
    parent, plan = StepFeatures({"map": torch.zeros(2, 64, 8)}), make_row_plan(grids(8, 8)["square"], 1)
    count, both = plan.levels[0].rows, alike(plan.levels[0].rows, 8).repeat_interleave(2, 0)
    overlays = [FeatureOverlay(parent, plan, {"map": both[e::2], "small": both[e::2, :1]}, share=2) for e in (0, 1)]
    raw, expected = overlays[0].own_bytes, overlays[0].whole("map", 0)
    overlays[0].encode(AS_RECORDED)
    assert overlays[0].share == 2 and overlays[0].own_bytes == raw
    overlays[0].encode(FeatureEncoding(8, 17))
    assert overlays[0].own_bytes == 8 * (count + -(-count // 2) + 1 + 4) + 4 * 2 * 8
    assert (overlays[0].whole("map", 0) - expected).abs().max() <= 0.1
    assert torch.equal(overlays[0].own_rows("small"), both[::2, :1])


def test_what_an_edit_found_changed_is_kept_once_and_encoded():
    """The map that skips to another is not kept with it, and both are read as before."""
    sites = {name: LayerSite(name, None, Role.NORM_HALO, 0) for name in ("skip", "map")}
    source, now = (StepFeatures({"skip": alike(64, 4), "map": alike(64, 8)}, joined={"map": "skip"}) for _ in range(2))
    delta, positions = FeatureDelta.between(source, now, sites), torch.tensor([3, 9])
    assert delta.maps["map"].shape[-1] == 8
    shifted_step = ShiftedFeatures(source, delta)
    for atol in (1e-6, 0.15):
        assert torch.allclose(shifted_step.whole("map", 0), now.whole("map", 0), atol=atol)
        assert torch.allclose(shifted_step.rows("map", 0, positions), now.rows("map", 0, positions), atol=atol)
        before = delta.own_bytes
        delta.encode(FeatureEncoding(8))
    assert delta.own_bytes < 0.25 * 4 * 2 * 64 * 12 and delta.own_bytes == before


def test_a_dense_step_is_kept_as_its_changes_and_what_it_alone_recorded():
    sites = {name: LayerSite(name, None, Role.NORM_HALO, 0) for name in ("skip", "map")}
    source, now = (
        StepFeatures(
            {"skip": alike(64, 4), "map": alike(64, 8), name: alike(64, 2)},
            {"map": torch.randn(2, 4, 2)},
            {"map": "skip"},
        )
        for name in ("lost", "query")
    )
    kept, positions = ShiftedFeatures.dense(source, now, sites), torch.tensor([3, 9])
    assert [name in kept for name in ("skip", "map", "query", "lost")] == [True, True, True, False]
    for name in ("skip", "map", "query"):
        assert torch.allclose(kept.whole(name, 0), now.whole(name, 0), atol=1e-6)
        assert torch.allclose(kept.rows(name, 0, positions), now.rows(name, 0, positions), atol=1e-6)
    assert kept.own_bytes + kept.shift.own_bytes == now.own_bytes
    assert recorded_statistics(kept, sites["map"]) is now.statistics["map"] and shifted(kept)


def test_a_shifted_step_has_the_maps_of_its_parent():
    parent = StepFeatures({"moved": torch.ones(1, 4, 2), "still": torch.ones(1, 4, 2)})
    moved = ShiftedFeatures(parent, FeatureDelta({"moved": torch.full((1, 4, 2), 2.0)}))
    assert "moved" in moved and "still" in moved and "none" not in moved
    assert moved.rows("moved", 0, torch.tensor([1, 3])).eq(3).all() and moved.whole("moved", 0).eq(3).all()
    assert moved.rows("still", 0, torch.tensor([1, 3])).eq(1).all() and moved.whole("still", 0).eq(1).all()


def test_what_lies_over_a_shifted_step_is_shifted():
    parent, plan = StepFeatures({"map": torch.zeros(1, 64, 8)}), make_row_plan(grids(8, 8)["square"], 1)
    moved = ShiftedFeatures(parent, FeatureDelta({}))
    assert not shifted(parent) and not shifted(FeatureOverlay(parent, plan, {}))
    assert shifted(moved) and shifted(FeatureOverlay(FeatureOverlay(moved, plan, {}), plan, {}))
