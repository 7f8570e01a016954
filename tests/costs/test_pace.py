"""What real runs correct: the choice between dense and sparse, and predicted seconds."""

from __future__ import annotations

import pytest

from fisedit.costs.pace import MOST_DENSE, Pace


def after(*runs: tuple[str, float]) -> Pace:
    """The pace after runs: a source, a dense edit or a sparse one, and their real over their predicted seconds."""
    pace = Pace()
    for kind, ratio in runs:
        pace = pace.after(ratio, sparse=kind == "sparse", edit=kind != "source")
    return pace


@pytest.mark.parametrize(
    ("runs", "correction"),
    [
        ([], 1),
        ([("source", 3.0)], 1),  # the machine is slower than it was, at dense and sparse runs alike
        ([("source", 1.0), ("sparse", 0.1)], 0.1),  # the table was measured on a busy machine: one run shows it
        ([("sparse", 0.1)], 0.1),
        ([("source", 2.0), ("sparse", 2.2)], 1),  # runs differ by as much
        ([("source", 1.0), ("sparse", 9.0)], 1),  # interrupted, or the first of its process
        ([("source", 1.0), ("sparse", 9.0), ("sparse", 1.1)], 1),
        ([("source", 1.0), ("sparse", 9.0), ("sparse", 2.0)], 2),  # two runs contradict the table
        ([("source", 1.0), *[("sparse", 2.0)] * 3, *[("sparse", 1.0)]], 1),
    ],
)
def test_the_quickest_of_the_last_runs_of_a_kind_correct_the_choice(runs, correction):
    assert after(*runs).correction == pytest.approx(correction)


def test_a_kind_that_was_not_run_yet_goes_as_the_other():
    assert Pace().of(sparse=True) is None
    assert after(("source", 3.0)).of(sparse=True) == 3.0
    assert after(("source", 3.0), ("sparse", 2.0)).of(sparse=True) == 2.0


def test_sparse_runs_are_tried_before_a_table_switches_them_off_and_again_later():
    assert not after(("sparse", 1.0)).is_sure
    tried = [("sparse", 1.0), ("sparse", 1.0)]
    assert after(*tried, *[("dense", 1.0)] * (MOST_DENSE - 1), *[("source", 1.0)] * 9).is_sure
    assert not after(*tried, *[("dense", 1.0)] * MOST_DENSE).is_sure
