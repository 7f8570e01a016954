"""Prompts that edits of a noun lead to, and its button on the page."""

from __future__ import annotations

import pytest

from app import html
from app.word_edits import noun_edits


@pytest.fixture(scope="module")
def tokenizer(pipelines):
    return pipelines["demo"].tokenizer


def test_things_are_removed_and_recoloured(tokenizer):
    prompt = "a cat and a blue mushroom on a beach"
    cat, mushroom = noun_edits(prompt, tokenizer)
    assert [prompt[each.start : each.end] for each in (cat, mushroom)] == ["cat", "mushroom"]
    assert cat.removed == "a blue mushroom on a beach" and mushroom.removed == "a cat on a beach"
    assert cat.recoloured["orange"] == "an orange cat and a blue mushroom on a beach"
    assert mushroom.recoloured["red"] == "a cat and a red mushroom on a beach" and "blue" not in mushroom.recoloured


@pytest.mark.parametrize(
    ("prompt", "coloured"),
    [
        ("an owl", "a red owl"),
        ("An old owl", "A red old owl"),
        ("an orange car", "a red car"),
        ("the owl", "the red owl"),
        ("two owls", "two red owls"),
    ],
)
def test_the_article_fits_the_colour(tokenizer, prompt, coloured):
    assert noun_edits(prompt, tokenizer)[-1].recoloured["red"] == coloured


def test_the_only_thing_is_not_removed(tokenizer):
    assert [noun.removed for noun in noun_edits("a cat", tokenizer)] == [""]
    assert noun_edits("", tokenizer) == ()


def test_places_are_those_of_scripts_and_words_are_escaped(tokenizer):
    prompt = '\N{CAT FACE}, a "cat" <b> and a cake'
    told = html.nouns(prompt, noun_edits(prompt, tokenizer), ["cake"])
    at = prompt.index("cake")
    assert f'data-at="{at + 1} {at + 5}"' in told and "&lt;b&gt;" in told and "<b>" not in told
    assert '<u title="not known by this model">cake</u></button>' in told
    assert html.nouns("a cat", ()) == "a cat"
