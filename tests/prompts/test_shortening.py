"""Prompts without some of their things."""

from __future__ import annotations

import pytest

from fisedit.prompts.shortening import without_things
from fisedit.prompts.text_diff import adds_words, diff, words
from fisedit.prompts.whole_picture import object_words
from fisedit.prompts.word_classes import TaggedPrompt
from training.tokens import build_tokenizer

TOKENIZER = build_tokenizer()


@pytest.mark.parametrize(
    ("prompt", "gone", "expected"),
    [
        ("a cat and a dog on a beach", "cat", "a dog on a beach"),
        ("a cat and a dog on a beach", "dog", "a cat on a beach"),
        ("a cat and a dog on a beach", "cat dog", "a beach"),
        ("a cat, a dog and a bird on a beach", "cat", "a dog and a bird on a beach"),
        ("a cat, a dog and a bird on a beach", "dog", "a cat and a bird on a beach"),
        ("a cat, a dog and a bird on a beach", "bird", "a cat and a dog on a beach"),
        ("a cat, a dog and a bird", "dog bird", "a cat"),
        ("a cat, a dog, a bird", "dog", "a cat, a bird"),
        ("a cat. a dog.", "dog", "a cat."),
        ("there is a cat, a hat and a bus in a park", "bus", "there is a cat and a hat in a park"),
        ("in the forest, a train and a bus", "train", "in the forest, a bus"),
        ("in the snow a cat and a dog", "cat", "in the snow a dog"),
        ("masterpiece, a cat, beach", "cat", "masterpiece, beach"),
        ("dog and cat in the snow", "cat", "dog in the snow"),
        ("a black and white ball and a cat", "ball", "a cat"),
        ("a photo of a fluffy red cat on a beach", "cat", "a photo of a beach"),
        ("a photo of a cat and a dog", "cat", "a photo of a dog"),
        ("a photo of a cat, highly detailed", "cat", "a photo, highly detailed"),
        ("a photo of a cat wearing a hat", "cat", "a photo"),
        ("a cat wearing a hat and a dog wearing a hat", "dog", "a cat wearing a hat"),
        ("a frog, a cat wearing a bow and a house", "house", "a frog and a cat wearing a bow"),
        ("on a grey planet, a heart and a donut", "donut", "on a grey planet, a heart"),
        ("a photo of a cat", "cat", "a photo"),
        ("a cat wearing a hat on a beach", "hat", "a cat on a beach"),
        ("a cat wearing a hat on a beach", "cat hat", "a beach"),
        ("a cat's hat on a table", "hat", "a cat on a table"),
        ("a man riding a horse in a park", "horse", "a man in a park"),
        ("a dog sitting next to a cat on a beach", "cat", "a dog sitting on a beach"),
        ("a cat sleeping on a mat", "cat", "a mat"),
        ("a dog and a (cat:1.4) on a beach", "cat", "a dog on a beach"),
        ("a cat and (a dog:1.3)", "cat", "(a dog:1.3)"),
        ("there is a cat", "cat", ""),
    ],
)
def test_what_joins_a_thing_goes_with_it(prompt, gone, expected):
    shorter = without_things(prompt, _things(prompt, gone), TOKENIZER)
    assert shorter == expected and not adds_words(diff(prompt, shorter, TOKENIZER))


def _things(prompt, named):
    found = object_words(TaggedPrompt.from_words(words(prompt, TOKENIZER)))
    return [word for word in found if word.text in named.split()]


@pytest.mark.parametrize("prompt", ["(a cat and a dog:1.3) on a beach", "[a dog, a cat] on a beach"])
def test_brackets_around_what_stays_too_keep_it_all(prompt):
    assert without_things(prompt, _things(prompt, "cat"), TOKENIZER) == prompt


def test_without_things_it_is_the_same():
    assert without_things("a  cat ,and a dog ", (), TOKENIZER) == "a  cat ,and a dog "


def test_words_beyond_the_encoders_reach_stay():
    prompt = "a cat and a dog, " + ", ".join(["a cat"] * 620)
    shorter = without_things(prompt, _things(prompt, "dog"), TOKENIZER)
    assert shorter == prompt.replace(" and a dog", "", 1)


def test_what_adds_words():
    assert adds_words(diff("a cat", "a cat and a hat", TOKENIZER))
    assert not adds_words(diff("a cat, a dog and a bird", "a cat and a dog", TOKENIZER))
