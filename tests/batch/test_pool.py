"""Workers in processes of their own."""

from __future__ import annotations

import os
import signal

import pytest

from fisedit.batch import pool
from fisedit.batch.manifest import plan_batch
from fisedit.batch.values import BatchJob, BatchSettings
from fisedit.batch.worker import BatchWorker
from tests.support.batches import AFTER, BEFORE
from tests.support.folders import pictures


@pytest.mark.slow
def test_a_killed_worker_fails_its_item_only(model, tmp_path):
    """Also: the pixels are those of this process."""
    pictures(tmp_path / "in", 2)
    items = plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", AFTER, BEFORE)).items
    settings = BatchSettings(str(model), num_inference_steps=2)
    with pool.open_pool(1, settings) as workers:
        workers.submit(0, items[0])
        while not workers._slots[0].ready:
            assert not list(workers.results())
        os.kill(workers._slots[0].process.pid, signal.SIGKILL)
        [(_, item, failed)] = waited(workers)
        assert item is items[0] and failed.reason == "its worker ended with signal 9 (Killed)"
        workers.submit(workers.idle_slots()[0], items[1])
        [(_, item, made)] = waited(workers)
    assert item is items[1] and made.data == BatchWorker(settings).process(items[1]).data


def waited(workers: pool.WorkerPool) -> list:
    while not (out := list(workers.results())):
        pass
    return out
