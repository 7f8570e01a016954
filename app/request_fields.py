"""Fields of other people's requests: what each route reads, and what becomes of the rest.

Every field is obeyed, or told in the answer's notes, or refused by name, unless its value asks for nothing. The
table in docs/app.md is made of these. Knows JSON values; neither routes nor pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fisedit.errors import InputError, as_text

MAX_NOTES = 40
"""Notes of an answer on fields; further ones are counted."""

_NOTHING: tuple[object, ...] = (None, "", [], {}, False, "None", "none")
"""Values that ask for nothing, 0 among them."""

Given = Mapping[str, Any]
"""Fields of a request by name, as its JSON or its form has them."""


class Handling(StrEnum):
    """The ways in which a field is handled."""

    OBEYED = "obeyed"
    TOLD = "told"
    REFUSED = "refused"
    IDLE = "asks for nothing"


OBEYED, TOLD, REFUSED, IDLE = Handling


@dataclass(frozen=True)
class Field:
    """A field of a route.

    Args:
        name: in the request.
        handling: obeyed, told, refused; or idle, where no value asks for anything.
        why: what is done, or what to do instead; for the message and the documents.
        usual: values that ask for nothing.
        needs: another field, without which this one asks for nothing; "" for none.
        is_usual: instead of `usual`, a function of the value.
    """

    name: str
    handling: Handling
    why: str = ""
    usual: tuple[object, ...] = _NOTHING
    needs: str = ""
    is_usual: Callable[[Any], bool] | None = field(default=None, compare=False)

    def asks(self, value: object) -> bool:
        """Return whether a value asks for something."""
        if self.is_usual is not None:
            return not self.is_usual(value)
        return value not in self.usual


class FieldTable:
    """The fields of a route.

    Args:
        fields: all that are known.
        prefix: prefix of their names in messages, such as "override_settings.".

    Attributes:
        fields: by name.
        prefix: the same.
    """

    def __init__(self, fields: Sequence[Field], prefix: str = "") -> None:
        self.fields = {each.name: each for each in fields}
        self.prefix = prefix

    def notes_on(self, given: Given) -> tuple[str, ...]:
        """Notes on what is given and not read. Raises InputError for what is refused."""
        notes = [note for name, value in given.items() if (note := self._note(name, value, given))]
        more = [f"{len(notes) - MAX_NOTES} more fields are not read"] if len(notes) > MAX_NOTES else []
        return (*notes[:MAX_NOTES], *more)

    def obeyed(self, given: Given) -> Obeyed:
        """The fields that the route may read."""
        return Obeyed(self, given)

    def _note(self, name: str, value: object, given: Given) -> str:
        known, got = self.fields.get(name), f"got {as_text(value, 40)}"
        if known is None:
            shown = as_text(name, 60).strip("'")
            return "" if value in (*_NOTHING, -1) else f"{self.prefix}{shown} is not known here and not read, {got}"
        needed = self.fields.get(known.needs)
        if not known.asks(value) or (needed is not None and not needed.asks(given.get(needed.name))):
            return ""
        if known.handling is REFUSED:
            raise InputError(f"{self.prefix}{name} is not supported, {got}; {known.why}")
        return f"{self.prefix}{name} is not read, {got}: {known.why}" if known.handling is TOLD else ""


def as_markdown(tables: Mapping[str, FieldTable]) -> str:
    """A Markdown table of all fields.

    Args:
        tables: routes and their fields.
    """
    routes: dict[tuple[str, str, str], list[str]] = {}
    for route, table in tables.items():
        for each in table.fields.values():
            routes.setdefault((table.prefix + each.name, each.handling, each.why), []).append(route)
    rows = [
        f"| `{name}` | {'all' if len(found) == len(tables) else ', '.join(found)} | {handling} | {why} |"
        for (name, handling, why), found in routes.items()
    ]
    return "\n".join(["| field | of | is | |", "|---|---|---|---|", *rows])


class Obeyed:
    """The fields of a request that a route reads; another name than those that are obeyed is a mistake of the route.

    Args:
        table: table of the route.
        given: the request's fields.
    """

    def __init__(self, table: FieldTable, given: Given) -> None:
        self._table, self._given = table, given

    def get(self, name: str, usual: Any = None) -> Any:
        """The value of a field; `usual` where it is not given."""
        return self._given.get(self._check(name), usual)

    def text(self, name: str) -> str:
        """A field's text, "" for none. Raises InputError for something else."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{name} must be text, got {type(value).__name__}")
        return value or ""

    def _check(self, name: str) -> str:
        if self._table.fields[name].handling is not OBEYED:
            raise KeyError(f"{name} is read, and the table of fields does not say so")
        return name
