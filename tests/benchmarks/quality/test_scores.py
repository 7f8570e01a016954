"""Scores of results with known answers, and success by a classifier with given output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.classifier import ADJECTIVES, BACKGROUND_WORDS, COLOURS, WORDS, SceneClassifier
from benchmarks.quality.methods import METHODS
from benchmarks.quality.scores import edit_succeeded, object_is_gone, score_edit
from benchmarks.scenes.layout import SceneChange
from benchmarks.scenes.scene import render
from tests.support.quality import SIDE, SQUARE, SWAP, TWO, fresh, grey, needs_font, picture


class Sees(torch.nn.Module):
    """A classifier with given output."""

    def __init__(self, objects: str, place: str, **colours: str) -> None:
        super().__init__()
        self.objects = torch.tensor([[1.0 if word in objects.split() else -1.0 for word in WORDS]])
        self.places = torch.tensor([[float(name == place) for name in BACKGROUND_WORDS]])
        self.looks = torch.full((1, len(WORDS), len(ADJECTIVES)), -1.0)
        for word, colour in colours.items():
            self.looks[0, WORDS.index(word), ADJECTIVES.index(colour)] = 1.0

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert pictures.shape == (1, 3, 16, 16)
        return self.objects, self.places, self.looks


PAINT = SceneChange("recolour", TWO, TWO.change(1, colour="blue"), 1)
DROP = SceneChange("delete", TWO, TWO.without(0), 0)
DRESS = SceneChange("dress", TWO, TWO.change(0, accessory="hat"), 0)
MOVE = SceneChange("background", TWO, replace(TWO, background="snow"))


SEEN = [
    (SWAP, Sees("dog car", "beach"), True),
    (SWAP, Sees("cat car", "beach"), False),
    (SWAP, Sees("cat dog car", "beach"), False),
    (SWAP, Sees("dog", "beach"), False),
    (SWAP, Sees("dog car", "snow"), False),
    (SWAP, Sees("dog car tree", "beach"), True),
    (PAINT, Sees("cat car", "beach", car="blue"), True),
    (PAINT, Sees("cat car", "beach", car="red", cat="blue"), False),
    (DROP, Sees("car", "beach"), True),
    (DROP, Sees("cat car", "beach"), False),
    (DRESS, Sees("cat car hat", "beach"), True),
    (DRESS, Sees("cat car", "beach"), False),
    (MOVE, Sees("cat car", "snow"), True),
    (MOVE, Sees("cat car", "beach"), False),
    (SceneChange("weather", TWO, replace(TWO, weather="rain")), Sees("cat car", "beach"), None),
]


def test_success_is_all_that_was_asked_and_nothing_that_was_taken():
    for change, judge, expected in SEEN:
        assert edit_succeeded(judge, change, picture(grey(100))) is expected, change
    assert "blue" in COLOURS


def test_what_is_gone():
    assert object_is_gone(Sees("car", "snow"), DROP, picture(grey(100))) is True
    assert object_is_gone(Sees("cat", "beach"), DROP, picture(grey(100))) is False
    assert object_is_gone(Sees("cat", "beach"), DRESS, picture(grey(100))) is None


@needs_font
def test_what_was_behind_a_deleted_object(opened):
    truth = render(DROP.after, SIDE).pixels
    case = fresh(opened, kind="delete", change=DROP)
    right, wrong = (replace(case.edited(SQUARE), picture=picture(pixels)) for pixels in (truth, 255 - truth))
    assert score_edit(case, right, None).truth_psnr == pytest.approx(148.13, abs=0.01)
    assert score_edit(case, wrong, None).truth_psnr < 20
    assert score_edit(fresh(opened, change=SWAP), right, None).truth_psnr is None


def test_our_own_score(generated):
    case = fresh(generated)
    told = score_edit(case, case.edited(SQUARE), None)
    assert (told.fit.cells.iou, told.fit.pixels.recall, told.fit.coverage) == (1, 1, 1)
    assert told.exact and told.success is None and told.background_psnr == pytest.approx(148.13, abs=0.01)
    assert told.inside_psnr > 20 and told.seam > 0 and told.dense_psnr is None and told.published
    nothing = score_edit(case, replace(case.edited(SQUARE), picture=case.source.image), None)
    assert nothing.kept_psnr == pytest.approx(148.13, abs=0.01) and told.kept_psnr < 60


def test_the_references_score(generated):
    case = fresh(generated, change=SWAP)
    told = score_edit(case, METHODS["blended-true"](case), SceneClassifier().eval())
    assert told.fit.cells.iou == 1 and told.exact is False and type(told.success) is bool
    assert told.inside_psnr is told.seam is told.published is None
    unmasked = score_edit(case, METHODS["reprompt"](case), None)
    assert unmasked.fit is unmasked.exact is unmasked.area is None and unmasked.background_psnr < told.background_psnr


def test_a_dense_fallback_is_compared_with_the_dense_run(generated):
    case = fresh(generated, prompt="a cat and a cake at night", true_mask=None, is_global=True)
    told = score_edit(case, case.plain, None)
    assert told.whole and told.fell_back and told.dense_psnr > 50 and told.background_psnr is told.inside_psnr is None
