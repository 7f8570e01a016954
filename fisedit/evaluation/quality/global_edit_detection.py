"""Whether an edit is known for one of the whole picture: by its words alone, or by how it ran. Knows no pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fisedit.evaluation.quality.metrics import f1_score
from fisedit.masking.text_diff import diff
from fisedit.values import EditKind

if TYPE_CHECKING:
    from fisedit.masking.text_diff import Tokenizer


@dataclass(frozen=True)
class GlobalEditVerdict:
    """An edit's prompts, whether it is `whole`, and whether it was `said` to be."""

    source_prompt: str
    prompt: str
    whole: bool
    said: bool


def by_words(pairs: Iterable[tuple[str, str, bool]], tokenizer: Tokenizer) -> list[GlobalEditVerdict]:
    """What the text diff says of (source prompt, new prompt, whether it is whole)."""
    return [GlobalEditVerdict(a, b, whole, diff(a, b, tokenizer).kind is EditKind.GLOBAL) for a, b, whole in pairs]


def row(asked: str, verdicts: Sequence[GlobalEditVerdict]) -> dict[str, Any]:
    """A row for a table: F1, and how many were missed or called whole for nothing."""
    said, true = [v.said for v in verdicts], [v.whole for v in verdicts]
    wrong = [(v.whole, v.said) for v in verdicts if v.whole is not v.said]
    missed = wrong.count((True, False))
    return {
        "asked": asked,
        "edits": len(verdicts),
        "whole": sum(true),
        "F1": f1_score(said, true),
        "missed": missed,
        "false alarms": len(wrong) - missed,
    }
