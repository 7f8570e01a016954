"""Who edits the items of `fisedit batch`: the ladder when memory runs out, and workers that die."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.batch import pool
from fisedit.batch import runner as running
from fisedit.batch.manifest import make_plan
from fisedit.batch.values import Executor, Failed, Job, Made, OnError, Settings
from fisedit.batch.worker import Hand
from fisedit.errors import NumericsError
from fisedit.storage.image_decoder import decode
from tests.support.batches import AFTER, BEFORE
from tests.support.folders import lines, pictures


class TestRelief:
    """The ladder: what ran out of memory is tried again, and the next item is unharmed."""

    @pytest.fixture
    def hand(self, model) -> Hand:
        return Hand(Settings(str(model), num_inference_steps=2, device="cpu", dtype="fp32"))

    @pytest.fixture
    def item(self, tmp_path):
        pictures(tmp_path / "in", 1)
        return make_plan(Job(tmp_path / "in", tmp_path / "out", AFTER, BEFORE)).items[0]

    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ],
    )
    def test_memory_that_ran_out_once(self, hand, item, monkeypatch, error):
        expected = hand.attempt(item)
        hand._source = None
        really, calls = Editor.open, []

        def scarce(*given, **options):
            calls.append(given)
            if len(calls) == 1:
                raise error
            return really(*given, **options)

        monkeypatch.setattr(Editor, "open", scarce)
        made = hand.attempt(item)
        assert made.data == expected.data and made.notes == (*expected.notes, "memory ran out once and was freed")

    def test_each_rung_helps_a_little_more(self, hand, item, monkeypatch):
        """Freed, evicted, sliced; then the model and the next source are as if nothing had been."""
        expected = hand.attempt(item)
        really, tried = Editor.edit, []

        def scarce(editor, *given, **options):
            tried.append((editor, {type(one).__name__ for one in editor.pipe.unet.attn_processors.values()}))
            if len(tried) < 4:
                raise MemoryError
            return really(editor, *given, **options)

        monkeypatch.setattr(Editor, "edit", scarce)
        made = hand.attempt(item)
        assert made.notes == (*expected.notes, "made with sliced attention, as memory ran out")
        ours, theirs = (np.asarray(decode(one.data).image).astype(int) for one in (made, expected))
        assert np.abs(ours - theirs).max() <= 2
        editors, processors = zip(*tried, strict=True)
        assert editors[0] is editors[1] and len(set(map(id, editors[1:]))) == 3, "the open source is kept at first"
        assert processors[:3] == ({"AttnProcessor2_0"},) * 3 and processors[3] == {"SlicedAttnProcessor"}
        assert hand.attempt(item) == replace(expected, seconds=ANY) and tried[4][1] == {"AttnProcessor2_0"}

    def test_what_lacks_memory_in_a_crowd_is_tried_alone(self, model, tmp_path, monkeypatch):
        pictures(tmp_path / "in")
        crowds = []

        @contextmanager
        def crowd(workers: int, settings: Settings):
            crowds.append(workers)
            with pool.open_pool(0, settings) as one:
                really = one._hand.attempt
                lacking = Failed("memory ran out", broken=True, memory=True)
                one._hand.attempt = lambda item: lacking if workers > 1 and item.name != "1.png" else really(item)
                yield one

        monkeypatch.setitem(running._POOLS, Executor.LOCAL, crowd)
        job, settings = (
            Job(tmp_path / "in", tmp_path / "out", AFTER, BEFORE),
            Settings(str(model), num_inference_steps=2),
        )
        steps = []
        done = running.run(job, settings, workers=2, on_error=OnError.STOP, on_step=lambda *told: steps.append(told))
        assert done.status == 0 and crowds == [2, 1] and len(lines(tmp_path / "out")) == 3
        assert steps == [(1, 3, None), (2, 3, None), (3, 3, None)]

    def test_memory_that_stays_out(self, hand, item, monkeypatch):
        expected = hand.attempt(item)
        with monkeypatch.context() as patch:
            patch.setattr(Editor, "edit", lambda *_, **__: bytes(1 << 60))
            failed = hand.attempt(item)
        assert isinstance(failed, Failed) and failed.reason.startswith("memory ran out")
        assert failed.broken and failed.memory
        assert hand.attempt(item).data == expected.data

    def test_a_device_that_stays_full(self, hand, item, monkeypatch):
        """The picture is made on the CPU, and the next one where it was meant to be."""
        expected, home, tried = hand.attempt(item), hand._home, []
        really = Editor.open
        where = property(lambda pipe: torch.device("cuda" if pipe is home else "cpu"))
        monkeypatch.setattr(type(home), "device", where)

        def full(editor, *given, **options):
            tried.append(editor.pipe is home)
            if editor.pipe is home:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return really(editor, *given, **options)

        monkeypatch.setattr(Editor, "open", full)
        hand._source = None
        made = hand.attempt(item)
        assert made.data == expected.data and tried == [True, True, True, True, False]
        assert made.notes[-1] == "made on the CPU, as the device's memory ran out"
        assert hand._pipe is home and hand._source is None

    def test_nan_is_tried_in_fp32(self, model, item, monkeypatch):
        hand = Hand(Settings(str(model), num_inference_steps=2, device="cpu", dtype="bf16"))
        really = Editor.edit

        def strict(editor, *given, **options):
            if editor.pipe.unet.dtype is not torch.float32:
                raise NumericsError("latents turned NaN")
            return really(editor, *given, **options)

        monkeypatch.setattr(Editor, "edit", strict)
        made = hand.attempt(item)
        assert isinstance(made, Made) and made.notes[-1].startswith("made in fp32")
        assert hand._pipe.unet.dtype is torch.bfloat16, "for one picture only"
        monkeypatch.setattr(Editor, "edit", lambda *_, **__: (_ for _ in ()).throw(NumericsError("NaN again")))
        assert hand.attempt(item) == Failed("NaN again", pytest.approx(0, abs=60))


def test_a_killed_worker_fails_its_item_only(model, tmp_path):
    """Also: the pixels are those of this process."""
    pictures(tmp_path / "in", 2)
    items = make_plan(Job(tmp_path / "in", tmp_path / "out", AFTER, BEFORE)).items
    settings = Settings(str(model), num_inference_steps=2)
    with pool.open_pool(1, settings) as workers:
        workers.give(0, items[0])
        while not workers._workers[0].ready:
            assert not list(workers.results())
        os.kill(workers._workers[0].process.pid, signal.SIGKILL)
        [(_, item, failed)] = waited(workers)
        assert item is items[0] and failed.reason == "its worker ended with signal 9 (Killed)"
        workers.give(workers.idle()[0], items[1])
        [(_, item, made)] = waited(workers)
    assert item is items[1] and made.data == Hand(settings).attempt(items[1]).data


def waited(workers: pool.Pool) -> list:
    while not (out := list(workers.results())):
        pass
    return out
