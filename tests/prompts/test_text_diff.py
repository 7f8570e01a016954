"""The prompt diff: a table of pairs, CLIP's own words, and properties that hold for any two strings."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings

from fisedit.prompts.text_diff import diff, words
from fisedit.values import EditKind, EditScript
from tests.support import prompt_pairs as pairs
from tests.support.pipelines import build_tokenizer
from tests.support.prompts import PROMPTS

TOKENIZER = build_tokenizer()
LOCAL = {
    EditKind.REPLACE: pairs.REPLACE,
    EditKind.INSERT: pairs.INSERT,
    EditKind.DELETE: pairs.DELETE,
    EditKind.REWEIGHT: pairs.REWEIGHT,
    EditKind.MIXED: pairs.MIXED,
}


def applied(script: EditScript) -> list[tuple[str, float]]:
    """The words that the script makes of the source prompt's: kept words, with each hunk's new ones in their place."""
    gone = {w.tokens for hunk in script.hunks for w in hunk.old}
    come = [w for hunk in script.hunks for w in hunk.new]
    made, position = [], 1
    for kept in [w for w in words(script.source_prompt, TOKENIZER) if w.tokens and w.tokens not in gone]:
        while come and come[0].tokens[0] <= position:
            made.append(come.pop(0))
            position += len(made[-1].tokens)
        made.append(kept)
        position += len(kept.tokens)
    return [(w.text, w.weight) for w in made + come]


def read(prompt: str) -> list[tuple[str, float]]:
    return [(w.text, w.weight) for w in words(prompt, TOKENIZER) if w.tokens]


def focus(script: EditScript) -> tuple[str, str]:
    old, new = (
        [w.text for h in script.hunks for w in side(h)] for side in (lambda h: h.focus_old, lambda h: h.focus_new)
    )
    return " ".join(old), " ".join(new)


def test_the_table_is_large_enough():
    assert sum(map(len, LOCAL.values())) + len(pairs.GLOBAL) + len(pairs.IDENTICAL) >= 150
    assert min(len(getattr(pairs, kind.name)) for kind in EditKind) >= 12


@pytest.mark.parametrize("kind", LOCAL, ids=lambda kind: kind.name)
def test_local_edits(kind):
    for source, prompt, old, new in LOCAL[kind]:
        script = diff(source, prompt, TOKENIZER)
        assert (script.kind, script.reason, *focus(script)) == (kind, "", old, new), f"{source!r} -> {prompt!r}"
        assert applied(script) == read(prompt)


def test_global_edits_say_why():
    for source, prompt, reason in pairs.GLOBAL:
        script = diff(source, prompt, TOKENIZER)
        assert script.kind is EditKind.GLOBAL and reason in script.reason, f"{source!r} -> {prompt!r}"
        assert applied(script) == read(prompt)


def test_identical_prompts():
    for source, prompt in pairs.IDENTICAL:
        script = diff(source, prompt, TOKENIZER)
        assert (script.kind, script.hunks) == (EditKind.IDENTICAL, ()), f"{source!r} -> {prompt!r}"


def test_a_change_beyond_the_text_encoders_reach_is_told():
    assert "beyond" in diff("word " * 900 + "cat", "word " * 900 + "dog", TOKENIZER).reason
    assert diff("a cat", "A  cat", TOKENIZER).reason == ""


def test_words_are_clips_own_with_offsets_and_tokens():
    prompt = "A Cat's  t-shirt, 42 cafe\u0301s"
    found = words(prompt, TOKENIZER)
    assert [w.text for w in found] == ["a", "cat", "'s", "t", "-", "shirt", ",", "4", "2", "cafés"]
    assert [prompt[w.start : w.end].lower() for w in found[:4]] == ["a", "cat", "'s", "t"]
    assert prompt[found[-1].start : found[-1].end] == "cafe\u0301s"
    assert found[0].tokens == (1,)
    assert [t for w in found for t in w.tokens] == list(range(1, 1 + sum(len(w.tokens) for w in found)))


def test_long_prompts_keep_their_words_but_lose_their_tokens():
    found = words("cat " * 700, TOKENIZER)
    assert len(found) == 700
    assert [bool(w.tokens) for w in found] == [True] * 600 + [False] * 100
    assert [w.tokens for w in found[74:76]] == [(75,), (78,)]


@pytest.mark.parametrize(
    "prompt", ["a Cat on a beach", "don't t-shirt, 19 cafés ½²", "一只猫 🐱🐶!", "<|startoftext|> x"]
)
def test_word_tokens_are_the_prompts_tokens(prompt):
    alone = [TOKENIZER(w.text, add_special_tokens=False).input_ids for w in words(prompt, TOKENIZER)]
    assert [token for ids in alone for token in ids] == TOKENIZER(prompt, add_special_tokens=False).input_ids
    assert [len(ids) for ids in alone] == [len(w.tokens) for w in words(prompt, TOKENIZER)]


def test_weighted_words_know_where_they_were_typed():
    prompt = "a ((Cat:1.2)), \\(x\\) [cafe\u0301:]"
    found = words(prompt, TOKENIZER)
    assert [w.text for w in found] == ["a", "cat", ",", "(", "x", ")", "café", ":"]
    assert [prompt[w.start : w.end] for w in found] == ["a", "Cat", ",", "(", "x", ")", "cafe\u0301", ":"]
    assert [w.weight for w in found] == [1, 1.32, 1, 1, 1, 1, 0.9091, 0.9091]
    assert [w.tokens[0] for w in found][:6] == [1, 2, 3, 4, 5, 6]


def test_scripts_read_well():
    assert str(diff("a cat on a beach", "a dog on a beach", TOKENIZER)) == "cat -> dog"
    assert str(diff("a cat", "a cat with a hat", TOKENIZER)) == "+ with a hat"
    assert str(diff("a cat", "a dog and a cat", TOKENIZER)) == "+ a dog and"
    assert str(diff("a cat", "a cat", TOKENIZER)) == "identical"
    assert str(diff("a [cat]", "a (cat:1.4)", TOKENIZER)) == "(cat:0.909) -> (cat:1.4)"


@pytest.mark.parametrize(
    "text", ["\ud800", "a\x00b", "\x1c", "İ" * 50, "\u200d\ufe0f", "<|endoftext|>" * 90, "'" * 300]
)
def test_odd_text_never_fails(text):
    assert diff(text, text, TOKENIZER).kind is EditKind.IDENTICAL
    assert diff("a cat", text, TOKENIZER).hunks
    assert applied(diff("a cat", text, TOKENIZER)) == read(text)


@settings(max_examples=300, deadline=None)
@given(PROMPTS, PROMPTS)
def test_applying_the_script_gives_the_prompt(source, prompt):
    script = diff(source, prompt, TOKENIZER)
    assert applied(script) == read(prompt)
    assert (script.kind is EditKind.IDENTICAL) == (read(source) == read(prompt)) == (not script.hunks)
    assert bool(script.reason) == (script.kind is EditKind.GLOBAL)
    back = diff(prompt, source, TOKENIZER)
    assert (back.kind is EditKind.GLOBAL) == (script.kind is EditKind.GLOBAL)


@settings(max_examples=100, deadline=None)
@given(PROMPTS, PROMPTS)
def test_every_local_script_points_at_words_of_its_prompts(source, prompt):
    script = diff(source, prompt, TOKENIZER)
    for hunk in script.hunks:
        assert set(hunk.focus_old) <= set(words(source, TOKENIZER))
        assert set(hunk.focus_new) <= set(words(prompt, TOKENIZER))
    if script.kind not in (EditKind.GLOBAL, EditKind.IDENTICAL):
        assert any(h.focus_old or h.focus_new for h in script.hunks)


def test_the_import_is_light():
    code = "import sys, fisedit.prompts.text_diff\n"
    code += "print({'torch', 'transformers', 'diffusers', 'scipy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
