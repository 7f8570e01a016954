"""What the page shows as text and HTML."""

from __future__ import annotations

from app import handlers, html
from fisedit.values import DENSE_STEP
from tests.support.app.requests import CAT, DOG, last, made


def test_changed_words_are_marked_and_nothing_else_becomes_html():
    assert html.changes(CAT, DOG) == "a <del>cat</del> <ins>dog</ins> and a cake on a beach"
    assert html.changes("a cat", "a cat in a hat") == "a cat <ins>in a hat</ins>"
    assert html.changes("a big cat", "a cat") == "a <del>big</del> cat"
    assert html.changes("a <b>", "a <script>x") == "a &lt;<del>b</del><ins>script</ins>&gt;<ins>x</ins>"


def test_names_in_the_history_are_escaped(state, session):
    made(state, session, '"><img src=x onerror=alert(1)>')
    drawn = html.tree(session.history, "0")
    assert "<img src=x" not in drawn and drawn.count("<button") == 1


def test_the_line_of_truth(state, session):
    source = made(state, session)
    dog = last(handlers.edit(state, session, DOG))
    seconds, dense = dog.stats.seconds["total"], dog.stats.growth.count(DENSE_STEP)
    rows = (dense + (len(dog.stats.growth) - dense) * dog.stats.active_rows[0] / 256) / len(dog.stats.growth)
    told = html.cost_summary(dog, source, seconds * 3, measured=False)
    assert f"{seconds:.1f} s" in told and "3.0 times faster than dense (predicted)" in told
    assert f"{rows:.0%} of the rows computed" in told and "outside the mask: identical" in told
    assert "2.0 times slower than dense (measured)" in html.cost_summary(dog, source, seconds / 2, measured=True)
    assert "as fast as dense (measured)" in html.cost_summary(dog, source, seconds * 1.02, measured=True)
    night = last(handlers.edit(state, session, "a dog and a cake at night"))
    assert "ran dense: " in html.cost_summary(night, dog, None, measured=False)
