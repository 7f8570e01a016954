"""What the page shows as text and HTML."""

from __future__ import annotations

import re

import numpy as np
import pytest

from app import handlers, html
from fisedit.editor.preview import Preview
from fisedit.values import EditKind, EditMask, EditScript, MaskSource
from tests.support.app.requests import CAT, DOG, last, made


def test_changed_words_are_marked_and_nothing_else_becomes_html():
    assert html.changes(CAT, DOG) == "a <del>cat</del> <ins>dog</ins> and a cake on a beach"
    assert html.changes("a cat", "a cat in a hat") == "a cat <ins>in a hat</ins>"
    assert html.changes("a big cat", "a cat") == "a <del>big</del> cat"
    assert html.changes("a <b>", "a <script>x") == "a &lt;<del>b</del><ins>script</ins>&gt;<ins>x</ins>"


def test_words_that_the_model_does_not_know_are_underlined():
    told = html.changes("a cat <b>", "a Robott <b> ice-cream", ("robott", "ice-cream"))
    assert re.findall(r"<u[^>]*>(.*?)</u>", told) == ["Robott", "ice-cream"] and "&lt;b&gt;" in told


def test_tokens_beyond_what_is_read_at_once_are_warned_of():
    assert html.tokens((0,), 75) == "" and "23 of 75" in html.tokens((23,), 75) and "long" not in html.tokens((75,), 75)
    assert "80 tokens: read in 2 parts of at most 75" in html.tokens((75, 5), 75)
    assert "605 tokens: only the first 600 are read" in html.tokens((75,) * 8 + (5,), 75)


@pytest.mark.parametrize(
    ("source", "confidence", "asks"),
    [(MaskSource.ATTENTION, 0.59, True), (MaskSource.ATTENTION, 0.6, False), (MaskSource.GIVEN, 0.0, False)],
)
def test_a_region_of_little_confidence_asks_for_a_pick(source, confidence, asks):
    grid = np.zeros((8, 8), bool)
    grid[2:5, 2:5] = True
    script = EditScript(CAT, DOG, EditKind.REPLACE, (), "")
    edit = handlers.EditEstimate(Preview(EditMask(grid, source, confidence), script, 1, 2), None, None, (64, 64), None)
    assert ('class="unsure"' in html.estimate(edit)) is ("pick it" in html.estimate(edit)) is asks


def test_names_in_the_history_are_escaped(state, session):
    made(state, session, '"><img src=x onerror=alert(1)>')
    drawn = html.tree(session.history, "0")
    assert "<img src=x" not in drawn and drawn.count("<button") == 1


def test_the_line_of_truth(state, session):
    source = made(state, session)
    dog = last(handlers.edit(state, session, DOG))
    seconds, less = dog.stats.seconds["total"], dog.stats.macs_dense / dog.stats.macs
    told = html.cost_summary(dog, source, None)
    assert (
        f"{seconds:.1f} s" in told
        and f"{less:.1f} times less arithmetic" in told
        and "outside the mask: identical" in told
    )
    assert "in full 4.2 s (measured)" in html.cost_summary(dog, source, 4.2) and "measured" not in told
    assert f"seed {source.config.seed}" in html.cost_summary(source, None, None)
    night = last(handlers.edit(state, session, "a dog and a cake at night"))
    assert "the whole picture is painted: " in html.cost_summary(night, dog, None)
