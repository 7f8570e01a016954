"""A local Ray cluster of two workers, batches on it, and what kills its workers."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from contextlib import contextmanager

import psutil
import pytest

from tests.support.processes import Run

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
