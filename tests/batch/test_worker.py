"""Batch workers: the fallbacks when memory runs out or numbers overflow."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from fisedit import Editor
from fisedit.batch import pool
from fisedit.batch import runner as running
from fisedit.batch.manifest import plan_batch
from fisedit.batch.values import BatchJob, BatchSettings, ExecutorKind, ItemFailure, ItemOutput, OnError
from fisedit.batch.worker import BatchWorker
from fisedit.errors import NumericsError
from fisedit.storage.images import decode
from tests.support.batches import AFTER, BEFORE
from tests.support.folders import lines, picture, pictures
from tests.support.pipelines import build_pipeline


class TestFallbacks:
    """Fallbacks: an item that ran out of memory is edited again, and the next item is unharmed."""

    @pytest.fixture
    def worker(self, model) -> BatchWorker:
        return BatchWorker(BatchSettings(str(model), num_inference_steps=2, device="cpu", dtype="fp32"))

    @pytest.fixture
    def item(self, tmp_path):
        pictures(tmp_path / "in", 1)
        return plan_batch(BatchJob(tmp_path / "in", tmp_path / "out", AFTER, BEFORE)).items[0]

    def test_edits_of_a_source_are_not_kept(self, worker, item):
        worker.process(item)
        worker.process(replace(item, prompt="a fox on a beach"))
        assert len(worker._source.editor.history) == 1

    def test_a_picture_too_long_for_its_format(self, worker, item, tmp_path, monkeypatch):
        """It is refused before it is opened, and the worker is as good as before."""
        wide = replace(item, picture=picture(tmp_path / "wide.png", size=(16_384, 8)), output="wide.webp")
        monkeypatch.setattr(Editor, "open", None)
        reason = "a .webp has at most 16383 pixels a side, got 16384x8; write a .png"
        assert worker.process(wide) == ItemFailure(reason, ANY)

    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ],
    )
    def test_memory_that_ran_out_once(self, worker, item, monkeypatch, error):
        expected = worker.process(item)
        worker._source = None
        really, calls = Editor.open, []

        def scarce(*given, **options):
            calls.append(given)
            if len(calls) == 1:
                raise error
            return really(*given, **options)

        monkeypatch.setattr(Editor, "open", scarce)
        made = worker.process(item)
        assert made.data == expected.data and made.notes == (*expected.notes, "memory ran out once and was freed")

    def test_each_fallback_needs_less_memory(self, worker, item, monkeypatch):
        """Freed, evicted, sliced; then the model and the next source are as if nothing had been."""
        expected = worker.process(item)
        really, tried = Editor.edit, []

        def scarce(editor, *given, **options):
            tried.append((editor, {type(one).__name__ for one in editor.pipe.unet.attn_processors.values()}))
            if len(tried) < 4:
                raise MemoryError
            return really(editor, *given, **options)

        monkeypatch.setattr(Editor, "edit", scarce)
        made = worker.process(item)
        assert made.notes == (*expected.notes, "made with sliced attention, as memory ran out")
        ours, theirs = (np.asarray(decode(one.data).image).astype(int) for one in (made, expected))
        assert np.abs(ours - theirs).max() <= 2
        editors, processors = zip(*tried, strict=True)
        assert editors[0] is editors[1] and len(set(map(id, editors[1:]))) == 3, "the open source is kept at first"
        assert processors[:3] == ({"AttnProcessor2_0"},) * 3 and processors[3] == {"SlicedAttnProcessor"}
        assert worker.process(item) == replace(expected, seconds=ANY) and tried[4][1] == {"AttnProcessor2_0"}

    def test_items_without_shared_memory_are_tried_by_one_worker(self, model, tmp_path, monkeypatch):
        pictures(tmp_path / "in")
        pools = []

        @contextmanager
        def open_pool(workers: int, settings: BatchSettings):
            pools.append(workers)
            with pool.open_pool(0, settings) as one:
                really = one._worker.process
                lacking = ItemFailure("memory ran out", broken=True, memory=True)
                one._worker.process = lambda item: lacking if workers > 1 and item.name != "1.png" else really(item)
                yield one

        monkeypatch.setitem(running._OPEN_POOL, ExecutorKind.LOCAL, open_pool)
        job, settings = (
            BatchJob(tmp_path / "in", tmp_path / "out", AFTER, BEFORE),
            BatchSettings(str(model), num_inference_steps=2),
        )
        steps = []
        done = running.run_batch(
            job, settings, workers=2, on_error=OnError.STOP, on_step=lambda *values: steps.append(values)
        )
        assert done.exit_status == 0 and pools == [2, 1] and len(lines(tmp_path / "out")) == 3
        assert steps == [(1, 3, None), (2, 3, None), (3, 3, None)]

    def test_memory_that_stays_out(self, worker, item, monkeypatch):
        expected = worker.process(item)
        with monkeypatch.context() as patch:
            patch.setattr(Editor, "edit", lambda *_, **__: bytes(1 << 60))
            failed = worker.process(item)
        assert isinstance(failed, ItemFailure) and failed.reason.startswith("memory ran out")
        assert failed.broken and failed.memory
        assert worker.process(item).data == expected.data

    def test_a_device_that_stays_full(self, worker, item, monkeypatch):
        """The picture is made on the CPU, and the next one where it was meant to be."""
        expected, home, tried = worker.process(item), worker._loaded, []
        really = Editor.open
        where = property(lambda pipe: torch.device("cuda" if pipe is home else "cpu"))
        monkeypatch.setattr(type(home), "device", where)

        def full(editor, *given, **options):
            tried.append(editor.pipe is home)
            if editor.pipe is home:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return really(editor, *given, **options)

        monkeypatch.setattr(Editor, "open", full)
        worker._source = None
        made = worker.process(item)
        assert made.data == expected.data and tried == [True, True, True, True, False]
        assert made.notes[-1] == "made on the CPU, as the device's memory ran out"
        assert worker._pipe is home and worker._source is None

    def test_an_overflow_of_half_precision_is_tried_in_fp32(self, tmp_path, item, monkeypatch):
        """A convolution before a norm, whose products are beyond fp16 and whose weights are not."""
        model = build_pipeline("demo")
        with torch.no_grad():
            model.unet.up_blocks[-1].resnets[-1].conv1.weight.mul_(2.0**17)
        model.save_pretrained(tmp_path / "large")
        worker = BatchWorker(BatchSettings(str(tmp_path / "large"), num_inference_steps=2, device="cpu", dtype="fp32"))
        expected = worker.process(item)
        worker._source = None
        worker._pipe.to(torch.float16)
        assert all(weight.isfinite().all() for weight in worker._pipe.unet.parameters())
        made = worker.process(item)
        assert isinstance(made, ItemOutput) and made.notes[-1] == "made in fp32, as the model gave NaN in less"
        assert made.data == expected.data and worker._pipe.unet.dtype is torch.float16, "for one picture only"
        monkeypatch.setattr(Editor, "edit", lambda *_, **__: (_ for _ in ()).throw(NumericsError("NaN again")))
        assert worker.process(item) == ItemFailure("NaN again", pytest.approx(0, abs=60))
