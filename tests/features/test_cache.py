"""Recorded features: the bytes an overlay holds, and which maps a shifted step has."""

from __future__ import annotations

import torch

from fisedit.features.cache import FeatureDelta, FeatureOverlay, ShiftedFeatures, StepFeatures, shifted
from fisedit.sparse_kernels.row_plan import make_row_plan
from tests.support.grids import grids


def test_an_overlay_counts_what_it_holds_and_not_its_parent():
    parent = StepFeatures({"map": torch.zeros(1, 64, 8)})
    rows = torch.zeros(1, 16, 8)
    overlay = FeatureOverlay(parent, make_row_plan(grids(8, 8)["square"], 1), {"map": rows})
    assert overlay.own_bytes == 4 * rows.numel()
    overlay.share = 2
    assert overlay.own_bytes == 2 * rows.numel()


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
