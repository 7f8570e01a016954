"""Fields of requests: obeyed, told or refused, and nothing else; and the documents' tables of them."""

from __future__ import annotations

import pytest

from app.request_fields import IDLE, OBEYED, REFUSED, TOLD, Field, FieldTable
from fisedit.errors import InputError
from tests.support.app.field_tables import filled
from tests.support.documents import APP_GUIDE

TABLE = FieldTable(
    (
        Field("mask", OBEYED),
        Field("blur", TOLD, "it stays sharp", (None, 4), "mask"),
        Field("tiling", REFUSED, "leave it out"),
        Field("task", IDLE),
    ),
    prefix="of.",
)


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ({"mask": "m", "blur": 8}, ["of.blur is not read, got 8: it stays sharp"]),
        ({"mask": "m", "blur": 4, "tiling": False, "task": "x"}, []),
        ({"mask": None, "blur": 8, "tiling": None}, []),
        ({"blur": 8, "tiling": 0}, []),
        ({"more": "yes", "less": 2.5}, ["of.more is not known here and not read, got 'yes'"]),
        ({"a": None, "b": "", "c": [], "d": {}, "e": False, "f": 0, "g": -1, "h": "None"}, []),
    ],
)
def test_what_is_not_read_is_told(given, notes):
    assert list(TABLE.notes_on(given))[: len(notes) or None] == notes


def test_what_is_refused_is_named_and_what_is_not_known_is_counted():
    with pytest.raises(InputError, match=r"^of\.tiling is not supported, got True; leave it out$"):
        TABLE.notes_on({"tiling": True})
    notes = TABLE.notes_on({f"field {i}\n": i + 1 for i in range(50)})
    assert len(notes) == 41 and notes[-1] == "10 more fields are not read" and "\n" not in "".join(notes)


def test_a_route_reads_nothing_that_its_table_does_not_name():
    given = TABLE.obeyed({"mask": "m", "blur": 8})
    assert given.get("mask") == given.text("mask") == "m"
    for name in ("blur", "other"):
        with pytest.raises(KeyError):
            given.get(name)
    with pytest.raises(InputError, match="mask must be text, got int"):
        TABLE.obeyed({"mask": 7}).text("mask")


def test_the_document_has_these_tables():
    assert filled(APP_GUIDE) == APP_GUIDE, "run python -m tests.support.app.field_tables"
