"""The difference between two prompts, word by word."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EditKind(StrEnum):
    """The kind of a prompt edit; GLOBAL edits have no region and run dense."""

    IDENTICAL = "identical"
    REPLACE = "replace"
    INSERT = "insert"
    DELETE = "delete"
    REWEIGHT = "reweight"
    GLOBAL = "global"
    MIXED = "mixed"


@dataclass(frozen=True)
class Word:
    """One word of a prompt: its text, its character span [start, end), the positions of its tokens, and its weight.

    Positions are counted in CLIP's sequence: the start token is position 0, so a prompt's first word begins at 1.
    Truncated words have no tokens.
    """

    text: str
    start: int
    end: int
    tokens: tuple[int, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Hunk:
    """One changed place: `old` words of the source prompt become `new` words. `focus_old` and `focus_new` are the words
    whose attention shows where (the noun for a changed adjective)."""

    kind: EditKind
    old: tuple[Word, ...]
    new: tuple[Word, ...]
    focus_old: tuple[Word, ...]
    focus_new: tuple[Word, ...]


@dataclass(frozen=True)
class EditScript:
    """The difference that turns `source_prompt` into `prompt`; empty `hunks` means that nothing changed."""

    source_prompt: str
    prompt: str
    kind: EditKind
    hunks: tuple[Hunk, ...]
    reason: str = ""

    def __str__(self) -> str:
        """One line for people: `cat -> dog; + a hat; cake -> (cake:1.4)`."""
        return "; ".join(_hunk_text(h) for h in self.hunks) or self.kind.value


def _hunk_text(hunk: Hunk) -> str:
    old, new = (" ".join(map(_word_text, words)) for words in (hunk.old, hunk.new))
    if old and new:
        return f"{old} -> {new}"
    return f"+ {new}" if new else f"- {old}"


def _word_text(word: Word) -> str:
    return word.text if word.weight == 1 else f"({word.text}:{word.weight:.3g})"
