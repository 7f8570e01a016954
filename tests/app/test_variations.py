"""Variations: several edits of one picture, each with other noise in the same region."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from app import handlers, history, variations
from app.validation import RegionSettings
from fisedit import Editor, Region
from fisedit.errors import Cancelled, InputError, NumericsError, SessionError
from fisedit.sessions.store import SessionStore
from tests.support.app.requests import CAT, DOG, QUICK, last, made

HALF = Image.fromarray(np.repeat([[255] * 64 + [0] * 64], 128, axis=0).astype(np.uint8))


def test_of_changed_words(state, session):
    source = made(state, session)
    first = last(variations.vary(state, session, DOG))
    results = list(session.history)[1:]
    assert session.current is first is results[0] and session.candidates == results and len(results) == 4
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


def saved(state, session):
    loaded = SessionStore(session.folder).load(lambda _, old, new: state.pool.first.diff(old, new))
    return [result.id for result in loaded.history]


def test_one_is_kept_and_the_others_leave_nothing(state, session):
    source = made(state, session)
    last(variations.vary(state, session, DOG))
    one, two, *_ = session.candidates
    assert list(session.kept) == [source] and saved(state, session) == [source.id]
    history.checkout(session, source.id)
    with pytest.raises(SessionError, match="no candidate is shown"):
        history.keep(session)
    history.checkout(session, two.id)
    assert history.keep(session) is two is session.current
    assert (
        list(session.history) == [source, two]
        and session.candidates == []
        and saved(state, session) == [source.id, two.id]
    )
    names = {path.name for path in session.folder.rglob("*") if path.is_file()}
    last(variations.vary(state, session, CAT, count=2))
    assert session.candidates[0].parent == two.id and one not in session.history
    history.discard(session)
    assert session.current is two and list(session.history) == [source, two]
    assert {path.name for path in session.folder.rglob("*") if path.is_file()} == names


def test_what_is_made_from_a_candidate_keeps_it(state, session):
    source = made(state, session)
    last(variations.vary(state, session, DOG))
    three = session.candidates[2]
    history.checkout(session, three.id)
    last(handlers.measure_dense(state, session, three.id))
    assert len(session.candidates) == 4
    edit = last(handlers.edit(state, session, CAT))
    assert list(session.history) == [source, three, edit] and session.candidates == []


def test_more_tries_take_the_place_of_those_before_unless_they_are_stopped(state, session):
    source = made(state, session)
    last(variations.vary(state, session, DOG))
    before = session.candidates
    run = variations.vary(state, session, DOG)
    next(step for step in run if step.step == 1)
    session.stop()
    with pytest.raises(Cancelled):
        list(run)
    assert session.candidates == before
    last(variations.vary(state, session, DOG, count=3))
    assert len(session.candidates) == 3 and list(session.history) == [source, *session.candidates]


def test_new_pictures_to_choose_from(state, session):
    last(handlers.generate(state, session, CAT, QUICK, count=2))
    assert [each.config.seed for each in session.candidates] == [7, 8] and not session.folder.exists()
    history.checkout(session, session.candidates[1].id)
    last(handlers.edit(state, session, DOG))
    assert [each.config.seed for each in session.history] == [8, 8] and session.candidates == []
    last(handlers.generate(state, session, CAT, QUICK, count=2))
    history.discard(session)
    assert len(session.history) == 2
    with pytest.raises(InputError, match="batch count"):
        handlers.generate(state, session, CAT, QUICK, count=5)


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
