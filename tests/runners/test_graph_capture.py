"""Captures: a stand-in that keeps a graph's contract, what is made once, and snapshots of results."""

from __future__ import annotations

import gc
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from fisedit.features.cache import held_bytes
from fisedit.runners import graph_capture
from fisedit.runners.graph_capture import GraphPool, LRUCache, capture, snapshot

pytestmark = pytest.mark.usefixtures("no_grad")


def test_the_stand_in_keeps_a_graphs_contract():
    """Inputs and results stay where they are; a replay sees what the inputs hold then."""
    x, runs = torch.ones(3), []

    def function():
        runs.append(1)
        return {"double": x * 2}

    captured = capture(function, torch.device("cpu"))
    first = captured.outputs["double"]
    x.fill_(5)
    assert first.tolist() == [2, 2, 2]
    captured.replay()
    assert captured.outputs["double"] is first
    assert first.tolist() == [10, 10, 10]
    assert len(runs) == 2


@pytest.mark.usefixtures("_streams")
def test_pools_that_live_have_streams_of_their_own(monkeypatch):
    monkeypatch.setattr(graph_capture, "STREAMS", ((0, 2), (-1, 1)))
    pools = [GraphPool() for _ in range(3)]
    assert len({pool.stream.cuda_stream for pool in pools}) == 3
    with pytest.raises(RuntimeError, match="more than 3"):
        GraphPool()
    freed = pools.pop(1).stream.cuda_stream
    gc.collect()  # pytest's last error holds a frame
    assert GraphPool().stream.cuda_stream == freed


@pytest.fixture
def _streams(monkeypatch):
    """torch's streams without a GPU: so many of a priority, given out in turn."""
    turns = {0: cycle([1, 2]), -1: cycle([3])}
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: SimpleNamespace(cuda_stream=next(turns[priority])))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


def test_what_is_made_once():
    once = LRUCache()
    assert [once.get(key, lambda key=key: [key]) for key in "aba"] == [["a"], ["b"], ["a"]]
    assert once.misses == 2 and "a" in once and "c" not in once


def test_of_many_the_least_used_goes():
    once = LRUCache(2)
    for key in "abaca":
        once.get(key, object)
    assert once.misses == 3 and "a" in once and "b" not in once and "c" in once


def test_a_snapshot_has_memory_of_its_own_and_shares_as_before():
    packed, alone = torch.randn(2, 5, 12), torch.randn(3, dtype=torch.float64)
    one, two, three = packed.chunk(3, -1)
    active_mask = snapshot({"one": one, "two": two[-1:], "three": three[:, :2], "alone": alone})
    expected = {"one": one.clone(), "two": two[-1:].clone(), "three": three[:, :2].clone(), "alone": alone.clone()}
    packed.zero_(), alone.zero_()
    assert all(torch.equal(active_mask[name], tensor) for name, tensor in expected.items())
    assert held_bytes(active_mask.values()) == packed.nbytes + alone.nbytes
