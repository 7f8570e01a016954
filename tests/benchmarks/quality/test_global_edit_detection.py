"""Prompt pairs, and the detection of global edits on them."""

from __future__ import annotations

import json
import re
from collections import Counter

from benchmarks.quality import global_edit_detection
from benchmarks.quality.global_edit_prompts import PAIR_FILES, prompt_pairs, written_pairs
from training.tokens import build_tokenizer


def test_prompt_pairs_are_said_whole_or_not():
    pairs = list(prompt_pairs(16, seed=3))
    assert pairs == list(prompt_pairs(16, seed=3))
    assert Counter(whole for *_, whole in pairs) == {True: 12, False: 4}
    for old, new, _ in pairs[1::4]:  # reordered
        assert old != new and Counter(re.findall(r"[a-z]+", old.replace("an ", "a "))) == Counter(
            re.findall(r"[a-z]+", new.replace("an ", "a "))
        )
    assert all(old in new for old, new, _ in pairs[::2])


def test_detection_counts_misses_and_false_alarms():
    pairs = [("a cat on a beach", "a cat at night", True), ("a cat on a beach", "a dog on a beach", True)]
    verdicts = global_edit_detection.detect_by_text(
        [*pairs, ("a cat in the city", "a cat in space", False)], build_tokenizer()
    )
    assert [verdict.said for verdict in verdicts] == [True, False, True]
    told = global_edit_detection.detection_row("words", verdicts)
    assert (told["edits"], told["whole"], told["missed"], told["false alarms"], told["F1"]) == (3, 2, 1, 1, 0.5)


def test_written_pairs_are_detected():
    """The reported pairs alone, which no rule was chosen on: F1 .95, and a floor a little under it."""
    reported, development = ([*written_pairs(name)] for name in reversed(PAIR_FILES))
    assert (len(reported), sum(whole for *_, whole in reported), len(development)) == (300, 150, 100)
    assert not {pair[:2] for pair in reported} & {pair[:2] for pair in development}
    row = global_edit_detection.detection_row(
        "reported", global_edit_detection.detect_by_text(reported, build_tokenizer())
    )
    assert row["F1"] > 0.94 and row["false alarms"] <= 4


def test_a_row_for_every_file_of_written_pairs(capsys):
    global_edit_detection.main([])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["edits"] for row in rows] == [sum(1 for _ in written_pairs(name)) for name in PAIR_FILES]
    assert all(0 <= row["F1"] <= 1 and row["whole"] <= row["edits"] for row in rows)
    global_edit_detection.main(PAIR_FILES[:1])
    assert json.loads(capsys.readouterr().out) == rows[0]
