"""A session's index: every field is checked before anything is built of it."""

from __future__ import annotations

import pytest

from fisedit.errors import SessionError
from tests.support.sessions import INDEX_CHANGES, change_index, files, load, refused, settings, written_again


def test_every_field_is_checked_before_anything_is_built(whole, tmp_path, monkeypatch):
    parts = files(whole["generated"])
    assert not refused(written_again(parts, tmp_path / "whole"))
    monkeypatch.setattr("fisedit.sessions.reader.decode", lambda *_, **__: pytest.fail("a picture was decoded"))
    for number, (case, change) in enumerate(INDEX_CHANGES.items()):
        folder = written_again(parts, tmp_path / str(number))
        change_index(folder / "session.json", change)
        assert refused(folder), case


TEXTS = (
    b"[" * 100_000,
    b'{"version": 2, "results": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"version": 1' + b"0" * 5000 + b"}",
    b'{"version": "\\ud800"}',
    b"null",
    b"\xff\xfe",
    b"{}",
    b"",
)


def test_odd_texts_are_refused(tmp_path):
    for text in TEXTS:
        (tmp_path / "session.json").write_bytes(text)
        assert refused(tmp_path), text[:40]


def test_a_lora_may_have_another_factor_in_every_layer(whole, tmp_path):
    place, scales = written_again(files(whole["generated"]), tmp_path / "s"), [["style", i / 8] for i in range(300)]
    change_index(place / "session.json", settings(loras=scales))
    assert len(load(place).history.find("1").config.loras) == 300


def test_an_index_that_was_changed_by_hand_is_told(whole, tmp_path):
    place = written_again(files(whole["look"]), tmp_path / "s")
    path = place / "session.json"
    path.write_text(path.read_text().replace("a dog", "a fox"))
    with pytest.raises(SessionError, match="is damaged"):
        load(place)
