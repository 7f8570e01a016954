"""A history of edits of every kind, and one more edit on each of its results."""

from __future__ import annotations

from tests.support.edits import BIRD, CAT, DOG
from tests.support.grids import grids

SQUARE, CORNER, MOST = (grids(16, 16)[name] for name in ("square", "corner", "all_but_one"))
QUICK = {"seed": 7, "num_inference_steps": 3}
NIGHT = "a bird and a cake at night"


def session(editor):
    """A source, a sparse edit, one that changes nothing, a sparse edit on it, a dense blended one, one on that with
    noise of its own."""
    editor.generate(CAT, **QUICK)
    editor.edit(DOG, mask=SQUARE, growth=(1, 1, 0))
    editor.edit(DOG)
    editor.edit(BIRD, mask=CORNER, growth=2)
    editor.edit(NIGHT, protect=SQUARE)
    editor.edit(DOG, mask=SQUARE, growth=1, seed=8)
    return editor


def last_edit(editor):
    """One more edit, on each result."""
    ids = [result.id for result in editor.history]
    return [_edit_on(editor, result_id) for result_id in ids]


def _edit_on(editor, result_id):
    editor.checkout(result_id)
    return editor.edit("a car and a cake on a beach", mask=CORNER, growth=1)


def same_pictures(ours, theirs):
    return all(a.image.tobytes() == b.image.tobytes() for a, b in zip(ours, theirs, strict=True))
