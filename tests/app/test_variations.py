"""Variations: several edits of one picture, each with other noise in the same region."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from app import handlers, variations
from app.validation import RegionSettings
from fisedit import Editor, Region
from fisedit.errors import Cancelled, InputError, NumericsError
from tests.support.app.requests import CAT, DOG, last, made

HALF = Image.fromarray(np.repeat([[255] * 64 + [0] * 64], 128, axis=0).astype(np.uint8))


def test_of_changed_words(state, session):
    source = made(state, session)
    first = last(variations.vary(state, session, DOG))
    results = list(session.history)[1:]
    assert session.current is first is results[0] and len(results) == variations.COUNT
    assert {result.parent for result in results} == {source.id} and {result.prompt for result in results} == {DOG}
    assert len({result.image.tobytes() for result in results}) == len({result.config.seed for result in results}) == 4


def test_of_the_edit_that_is_shown(state, session):
    source = made(state, session)
    region = RegionSettings(add=HALF.resize(source.size), only=True)
    edit = last(handlers.edit(state, session, DOG, region))
    last(variations.vary(state, session, DOG))
    results = list(session.history)[2:]
    assert {result.parent for result in results} == {source.id}
    assert all(np.array_equal(result.mask.grid, edit.mask.grid) for result in results)
    assert len({result.image.tobytes() for result in (edit, *results)}) == 5


def test_of_the_edit_that_is_shown_without_what_is_protected(state, session):
    source = made(state, session)
    last(handlers.edit(state, session, DOG, RegionSettings(add=Image.new("L", source.size, 255), only=True)))
    last(variations.vary(state, session, DOG, RegionSettings(protect=HALF)))
    kept = [np.asarray(result.image)[:, :64] for result in session.history]
    assert len(kept) == 6 and not np.array_equal(kept[1], kept[0])
    assert all(np.array_equal(one, kept[0]) for one in kept[2:])


def test_regions_with_prompts_of_their_own_read_no_protect(state, session):
    made(state, session)
    region = RegionSettings(regions=((Region.box(0, 0, 64, 128), DOG),))
    last(handlers.edit(state, session, "", region))
    with pytest.raises(InputError, match="clear it"):
        variations.vary(state, session, CAT, RegionSettings(protect=HALF))


def test_a_source_needs_a_change(state, session):
    made(state, session)
    with pytest.raises(InputError, match="change a word or paint first"):
        variations.vary(state, session, CAT)


def test_one_that_fails_keeps_none(state, session, monkeypatch):
    source, edit, calls = made(state, session), Editor.edit, []

    def fails_at_the_second(editor, *args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise NumericsError("the model produced NaN")
        return edit(editor, *args, **options)

    monkeypatch.setattr(Editor, "edit", fails_at_the_second)
    with pytest.raises(NumericsError):
        last(variations.vary(state, session, DOG))
    assert list(session.history) == [source] and session.current is source


def test_stopped_it_keeps_what_is_finished(state, session):
    source = made(state, session)
    run = variations.vary(state, session, DOG)
    for progress in run:
        if progress.step == 6:  # within the second of four steps each
            session.stop()
    first = progress.result
    assert [result.id for result in session.history] == [source.id, first.id] and session.current is first
    run = variations.vary(state, session, CAT)
    next(step for step in run if step.step == 1)
    session.stop()
    with pytest.raises(Cancelled):
        list(run)
    assert session.current is first and len(session.history) == 2
