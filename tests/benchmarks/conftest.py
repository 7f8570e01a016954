"""Cases and datasets of the quality benchmark."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.quality import pie_bench, scene_edits
from fisedit.bench import metrics
from fisedit.bench.edit_case import BenchmarkEdit, make_case
from tests.support import pipelines as tiny
from tests.support.edits import CAT, DOG
from tests.support.quality import ENTRY, HOW, SIDE, SQUARE, picture
from training.tokens import build_tokenizer


@pytest.fixture(scope="module")
def words():
    return scene_edits.single_token_words(build_tokenizer())


@pytest.fixture(scope="module")
def spoken_pipe():
    """A tiny pipeline whose tokenizer knows every word of the scenes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "build_tokenizer", build_tokenizer)
        return tiny.build_pipeline("demo")


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "pie"
    path = folder / "annotation_images" / ENTRY["image_path"]
    path.parent.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    picture(pixels).resize((pie_bench.SIDE, pie_bench.SIDE)).save(path)
    (folder / "mapping_file.json").write_text(json.dumps({"000000000000": ENTRY}))
    return folder


@pytest.fixture(scope="module")
def generated(pipelines):
    """A case of a generated source whose true mask is a square."""
    edit = BenchmarkEdit("swap", CAT, DOG, None, 7, metrics.cells_to_pixels(SQUARE), is_global=False)
    return make_case(pipelines["demo"], edit, **HOW)


@pytest.fixture(scope="module")
def opened(pipelines):
    """The same of an opened picture."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    shown = picture(pixels).resize((SIDE, SIDE))
    edit = BenchmarkEdit("swap", CAT, DOG, shown, 7, metrics.cells_to_pixels(SQUARE), is_global=False)
    return make_case(pipelines["demo"], edit, **HOW)
