"""`fisedit batch --executor ray` on a local cluster of two workers: the same files, though a worker is lost."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.folders import picture, pictures, tree
from tests.support.ray_clusters import AFTER, RAY, batch, cluster, killer

__all__ = ["batch", "cluster"]  # fixtures


@pytest.mark.slow
def test_a_lost_workers_item_is_done_elsewhere(cluster, batch, tmp_path):
    """And every file is that of workers of this machine, byte for byte."""
    pictures(tmp_path / "in")
    with killer(1) as killed:
        run = batch("ray", *RAY, steps=10)
    assert (len(killed), run.status) == (1, 0), run.err
    assert json.loads(run.out)["counts"]["done"] == 3
    assert batch("local", "--workers", "0", steps=10).status == 0
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")


def test_no_ray(fisedit, tmp_path, monkeypatch):
    pictures(tmp_path / "in", 1)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    run = fisedit("batch", "in", "out", "--prompt", AFTER, "--executor", "ray", "--model", "./nowhere")
    run.refused("input", "--executor ray needs Ray", "pip install 'fisedit[ray]'")
    assert not (tmp_path / "out").exists()


def test_no_workers(fisedit, tmp_path):
    picture(tmp_path / "in" / "a.png")
    run = fisedit("batch", "in", "out", "--prompt", AFTER, "--executor", "ray", "--workers", "0")
    run.refused("input", "workers must be 1 or more")
