"""`fisedit batch --executor ray` on a local cluster of two workers: the same files, though a worker is lost."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
from contextlib import contextmanager

import psutil
import pytest

from tests.conftest import Run
from tests.support.folders import picture, pictures, tree

TOKEN = secrets.token_hex(32)  # one for every cluster of this process: Ray reads it once
BEFORE, AFTER = "a cat and a cake on a beach", "a dog and a cake on a beach"
RAY = ("--executor", "ray", "--workers", "2")


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, each with room for one worker, which demand a token."""
    told = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        made.other = made.add_node(**node)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


@pytest.fixture
def batch(fisedit, model):
    """Edits the pictures of a folder by so many steps; returns what was told."""

    def run(folder, *options, said=("--prompt", AFTER), steps=2) -> Run:
        words = (*said, "--source-prompt", BEFORE, "--num-inference-steps", steps, "--model", model)
        return fisedit("batch", "in", folder, *words, "--json", *options)

    return run


def working() -> list[int]:
    """Processes of actors that have an item."""
    every = psutil.process_iter(["pid", "cmdline"])
    return [p.pid for p in every if (p.info["cmdline"] or [""])[0].startswith("ray::RemoteWorker.process")]


@contextmanager
def killer(most: int, number: int = signal.SIGKILL):
    """Signals so many workers, one after the other, each with an item; yields their ids."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while len(killed) < most and not over.wait(0.02):
            for pid in [pid for pid in working() if pid not in killed][:1]:
                killed.append(pid)
                os.kill(pid, number)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


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
