"""Finds how a CSV table separates its columns, as spreadsheets of any country write it. Knows text, no files."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_SEPARATORS, _SEPARATOR_LINE = (",", ";", "\t", "|"), re.compile(r'"?sep=([,;\t|:])"?(?:\r\n?|\n)')
"""Separators that a header may have, and the line before it by which spreadsheets tell theirs."""

_LINE = re.compile(r"[^\r\n]+")


@dataclass(frozen=True)
class CsvTable:
    """A table whose separator is known.

    Args:
        text: The header and what follows.
        separator: One character.
        lines_before: The number of lines before the header that are no part of the table.
    """

    text: str
    separator: str
    lines_before: int = 0


def separated(text: str, known: Collection[str]) -> CsvTable:
    """Find the separator by which a table's header has most of the known columns; a comma unless another has more.

    Args:
        text: The file's text.
        known: Names of columns in lower case.
    """
    if told := _SEPARATOR_LINE.match(text):
        return CsvTable(text[told.end() :], told[1], 1)
    header = _LINE.search(text)
    names = header[0].casefold() if header else ""

    def found(separator: str) -> int:
        return len({name.strip(' "') for name in names.split(separator)}.intersection(known))

    return CsvTable(text, max(_SEPARATORS, key=found))
