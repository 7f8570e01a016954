"""E2: the same prompt, or an empty mask, gives the source image's bytes with no UNet call."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fisedit import Editor
from fisedit.values import MaskSource
from tests.support.edits import CAT, DOG, Calls, same
from tests.support.grids import grids
from tests.support.pictures import noise, scene

SQUARE = grids(16, 16)["square"]


@pytest.fixture(params=["shallow", "sdxl"])
def editor(pipelines, request):
    return Editor(pipelines[request.param])


@pytest.mark.parametrize(
    ("prompt", "options", "why"),
    [
        (CAT, {}, "the prompt says the same"),
        (CAT.upper(), {"mask": SQUARE}, "the prompt says the same"),
        (DOG, {"mask": np.zeros((16, 16), bool)}, "the mask is empty"),
        (DOG, {"mask": SQUARE, "protect": np.ones((16, 16), bool)}, "nothing is left of the mask"),
        (DOG, {"protect": Image.new("L", (128, 128), 255)}, "nothing is left of the mask"),
    ],
    ids=["same prompt", "same words", "empty mask", "protected mask", "protected words"],
)
def test_nothing_to_do_is_the_source_and_no_call(editor, source, prompt, options, why):
    with Calls(editor.pipe.unet) as calls:
        result = editor.edit(prompt, **options)
    assert calls.dense == calls.sparse == 0
    assert same(result, source) and not result.mask.grid.any() and result.mask.source is MaskSource.NOWHERE
    assert result.parent == source.id and editor.current is result
    (note,) = result.stats.notes
    assert note.startswith(f"nothing was edited: {why}")
    assert result.stats.macs == result.stats.unet_evaluations_sparse == result.stats.unet_evaluations_dense == 0


@pytest.mark.parametrize("picture", [scene(), noise("RGBA", 50, 90)], ids=["canvas", "RGBA"])
def test_the_same_prompt_gives_the_picture_back_and_no_call(editor, picture):
    source = editor.open(picture, CAT, num_inference_steps=3)
    with Calls(editor.pipe.unet) as calls:
        result = editor.edit(CAT)
    assert calls.dense == calls.sparse == 0
    assert (result.image.mode, result.image.size) == (picture.mode, picture.size)
    assert result.image.tobytes() == source.image.tobytes() == picture.tobytes()
    assert result.mask.source is MaskSource.NOWHERE
