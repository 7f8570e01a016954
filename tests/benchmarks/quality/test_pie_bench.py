"""PIE-Bench: its masks, its metrics, and folders that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quality import pie_bench
from fisedit.errors import InputError
from tests.support.edits import CAT, DOG
from tests.support.quality import ENTRY, grey, picture


def test_runs_are_decoded_with_the_border():
    mask = pie_bench.decode_runs([7, 2, 19, 1], side=6)
    inner = np.zeros((4, 4), bool)
    inner[0, :2] = inner[2, 0] = True
    assert np.array_equal(mask[1:-1, 1:-1], inner)
    assert mask[0].all() and mask[-1].all() and mask[:, 0].all() and mask[:, -1].all()
    assert pie_bench.decode_runs([30, 100], side=6)[5].all()  # a run is cut at the end
    for bad in ([7], [7, 2, 36, 1], [-1, 2]):
        with pytest.raises(InputError, match="start and length pairs"):
            pie_bench.decode_runs(bad, side=6)


def test_published_background_by_hand():
    edited = np.zeros((32, 32), bool)
    edited[:8] = True
    inside, outside = grey(100, 32), grey(100, 32)
    inside[:8], outside[16:] = 0, 151
    same = pie_bench.background_metrics(picture(inside), picture(grey(100, 32)), edited)
    assert (same.mse, same.ssim) == (0, 1) and same.psnr == pytest.approx(148.13, abs=0.01)
    moved = pie_bench.background_metrics(picture(outside), picture(grey(100, 32)), edited)
    assert moved.mse == pytest.approx(0.2**2 / 2) and moved.psnr == pytest.approx(-10 * np.log10(0.02))
    assert 0 < moved.ssim < 1
    assert pie_bench.background_metrics(picture(inside), picture(outside), np.ones((32, 32), bool)) is None


def test_a_folder_of_pie_bench_is_read(dataset):
    entries = pie_bench.read_mapping(dataset)
    (edit,) = pie_bench.load_edits(dataset, entries, 128)
    assert (edit.kind, edit.source_prompt, edit.prompt) == ("change object", CAT, DOG)
    assert edit.picture.size == (128, 128) and edit.is_global is edit.change is None
    assert edit.true_mask[32:64, 32:64].all() and edit.true_mask[2:-2, 2:-2].sum() == 32 * 32


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"0": {"image_path": "one.png"}}', '{"0": 1}'])
def test_another_folder_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "mapping_file.json").write_text(content)
    with pytest.raises(InputError, match=r"mapping_file\.json"):
        pie_bench.read_mapping(tmp_path)


def test_a_missing_picture_is_told(dataset):
    (dataset / "annotation_images" / ENTRY["image_path"]).write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"one\.png must be a picture"):
        next(pie_bench.load_edits(dataset, [ENTRY], 128))
