"""Edits of drawn scenes and their true masks."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.quality import scene_edits
from benchmarks.scenes.held_out import is_unseen
from benchmarks.scenes.layout import CHANGE_KINDS, sample_change
from benchmarks.scenes.vocabulary import BACKGROUND, OBJECT
from fisedit.bench.edit_case import BenchmarkEdit
from fisedit.errors import InputError
from fisedit.models.vocabulary import Vocabulary
from tests.support.quality import needs_font
from training.tokens import build_tokenizer


def test_a_word_is_known_when_it_is_one_token():
    tokenizer = build_tokenizer()
    assert scene_edits.is_single_token(tokenizer, "cat") and scene_edits.is_single_token(tokenizer, "snowflakes")
    assert not scene_edits.is_single_token(tokenizer, "zebra")


def test_words_that_a_model_lists_are_known_and_other_tokens_are_not():
    words = frozenset({"cat", "zebra"})
    pipe = SimpleNamespace(tokenizer=build_tokenizer(), vocabulary=Vocabulary(words, "it draws cats", "its page"))
    assert list(filter(scene_edits.known_words(pipe), ("cat", "dog", "zebra"))) == ["cat"]
    pipe.vocabulary = None
    assert list(filter(scene_edits.known_words(pipe), ("cat", "dog", "zebra"))) == ["cat", "dog"]


def spoken(edit: BenchmarkEdit) -> set[str]:
    return set(re.findall(r"[a-z]+", f"{edit.source_prompt} {edit.prompt}"))


@needs_font
def test_edits_are_of_all_kinds_from_a_seed(words):
    assert scene_edits.available_kinds(words) == CHANGE_KINDS
    first, again, other = (list(scene_edits.sample_edits(40, 64, words, CHANGE_KINDS, seed)) for seed in (0, 0, 1))
    assert Counter(edit.kind for edit in first) == dict.fromkeys(CHANGE_KINDS, 5)
    assert sum(edit.picture is None for edit in first) == 8
    assert [e.prompt for e in first] == [e.prompt for e in again] != [e.prompt for e in other]
    assert all(np.array_equal(a.picture, b.picture) for a, b in zip(first, again, strict=True))
    assert all(map(words, set().union(*map(spoken, first))))
    assert all(edit.source_prompt != edit.prompt for edit in first)
    assert all(is_unseen(edit.change.before) and is_unseen(edit.change.after) for edit in first)


@needs_font
@pytest.mark.parametrize("kind", CHANGE_KINDS)
def test_the_truth_holds_every_pixel_that_differs(kind):
    rng = np.random.default_rng(0)
    for change in (sample_change(rng, kind) for _ in range(30)):
        true_mask, differs = scene_edits.true_mask(change, 64), change.region(64)
        if kind in scene_edits.GLOBAL_KINDS:
            assert true_mask is None
            continue
        assert (true_mask | ~differs).all() and differs.sum() > 0.3 * true_mask.sum()
        removed = scene_edits.removed_pixels(change, 64)
        assert (removed is None) is (kind not in ("swap", "delete"))
        assert removed is None or ((true_mask | ~removed).all() and removed.any())


@needs_font
def test_only_opened_sources_have_a_truth(words):
    for edit in scene_edits.sample_edits(32, 64, words, CHANGE_KINDS):
        assert edit.is_global is (edit.kind in scene_edits.GLOBAL_KINDS)
        assert (edit.true_mask is None) is (edit.is_global or edit.picture is None)


@pytest.mark.slow
def test_a_small_vocabulary_is_kept_to(monkeypatch):
    monkeypatch.setattr(scene_edits, "_MAX_ATTEMPTS", 300)
    few = {*OBJECT, *BACKGROUND, *"a an and the on in at under mountains there is picture of".split()}
    said = scene_edits.available_kinds(few.__contains__)
    assert set(said) == {"swap", "insert", "delete", "background"}
    assert set().union(*(spoken(e) for e in scene_edits.sample_edits(8, 64, few.__contains__, said))) <= few
    with pytest.raises(InputError, match="words of drawn scenes"):
        scene_edits.available_kinds({"cat", "beach"}.__contains__)
