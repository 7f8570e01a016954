"""The detection of edits of the whole picture: by the text diff, or by how they ran. Knows no pictures.

`python -m benchmarks.quality.global_edit_detection` prints a row for each file of written prompt pairs as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.quality.global_edit_prompts import PAIR_FILES, written_pairs
from fisedit.bench.metrics import f1_score
from fisedit.models.loader import demo_folder
from fisedit.prompts.text_diff import diff
from fisedit.values import EditKind

if TYPE_CHECKING:
    from fisedit.prompts.text_diff import Tokenizer


@dataclass(frozen=True)
class GlobalEditVerdict:
    """An edit's prompts, and whether it is global.

    Args:
        source_prompt: what the source shows.
        prompt: what the edit shall show.
        whole: whether the edit concerns the whole picture.
        said: whether it was detected to.
    """

    source_prompt: str
    prompt: str
    whole: bool
    said: bool


def detect_by_text(pairs: Iterable[tuple[str, str, bool]], tokenizer: Tokenizer) -> list[GlobalEditVerdict]:
    """The text diff's verdicts.

    Args:
        pairs: (source prompt, new prompt, whether the edit is global).
        tokenizer: the model's.
    """
    return [
        GlobalEditVerdict(old, new, whole, diff(old, new, tokenizer).kind is EditKind.GLOBAL)
        for old, new, whole in pairs
    ]


def detection_row(name: str, verdicts: Sequence[GlobalEditVerdict]) -> dict[str, Any]:
    """A row of the report's table: F1, misses and false alarms.

    Args:
        name: what was detected, for the column "asked".
        verdicts: The verdicts of every edit.
    """
    detected, expected = [v.said for v in verdicts], [v.whole for v in verdicts]
    wrong = [(v.whole, v.said) for v in verdicts if v.whole is not v.said]
    missed = wrong.count((True, False))
    return {
        "asked": name,
        "edits": len(verdicts),
        "whole": sum(expected),
        "F1": f1_score(detected, expected),
        "missed": missed,
        "false alarms": len(wrong) - missed,
    }


def main(names: Sequence[str]) -> None:
    """Print a row for each file of written pairs, split by the demo model's tokenizer.

    Args:
        names: The names of `PAIR_FILES` to print; none for all.
    """
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(demo_folder() / "tokenizer")
    for name in names or PAIR_FILES:
        row = detection_row(name, detect_by_text(written_pairs(name), tokenizer))
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
