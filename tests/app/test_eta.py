"""How long runs will take."""

from __future__ import annotations

import pytest

from app.eta import RuntimeEstimator
from fisedit.values import EditStats, MaskSource


def ran(seconds, macs, sparse):
    """What a run tells of itself; a dense one takes 1000 multiply-accumulates."""
    return EditStats(
        mask_area=0.1,
        mask_source=MaskSource.GIVEN,
        mask_confidence=1.0,
        active_rows=(),
        growth=(),
        unet_evaluations_dense=4 * (not sparse),
        unet_evaluations_sparse=4 * sparse,
        macs=macs,
        macs_dense=1000,
        seconds={"total": seconds},
        recorded_bytes=0,
    )


def test_seconds_to_come_follow_the_table_and_then_what_was_seen():
    estimator = RuntimeEstimator()
    assert estimator.dense_seconds(1000) is None is estimator.sparse_seconds(200, 1000)
    estimator.observe(ran(10.0, 1000, sparse=False))
    assert estimator.dense_seconds(500) == 5 and estimator.sparse_seconds(200, 1000) == pytest.approx(2.78)
    estimator.observe(ran(5.56, 200, sparse=True))
    assert estimator.sparse_seconds(200, 1000) == pytest.approx(5.56) and estimator.dense_seconds(1000) == 10
    assert 5.56 < estimator.sparse_seconds(333, 1000) < 10, (
        "what no mask saves is added, so that large edits stay below a dense run"
    )
    estimator.observe(ran(0.0, 0, sparse=False))
    assert estimator.dense_seconds(1000) == 10


def test_a_run_that_somebody_watches_tells_more_than_trials():
    """Trials run without previews and a browser beside them."""
    estimator = RuntimeEstimator()
    estimator.observe(ran(1.0, 1000, sparse=False), trial=True)
    estimator.observe(ran(0.5, 200, sparse=True), trial=True)
    assert estimator.dense_seconds(1000) == 1 and estimator.sparse_seconds(200, 1000) == pytest.approx(0.5)
    estimator.observe(ran(3.0, 1000, sparse=False))
    estimator.observe(ran(1.0, 1000, sparse=False), trial=True)
    assert estimator.dense_seconds(1000) == 3 and estimator.sparse_seconds(200, 1000) == pytest.approx(1.5)
    estimator.observe(ran(1.2, 200, sparse=True))
    assert estimator.sparse_seconds(200, 1000) == pytest.approx(1.2)
