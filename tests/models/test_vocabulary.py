"""A model whose folder lists its words says which words of a prompt it does not know; other models say nothing."""

from __future__ import annotations

import json

import pytest

from fisedit import Editor
from fisedit.errors import ModelError
from fisedit.models.loader import config_folder
from fisedit.models.vocabulary import VOCABULARY_FILE, Vocabulary, read_vocabulary, vocabulary_of

KNOWN = Vocabulary(frozenset({"a", "cat", "x-ray"}), "it draws cats", "words.txt")


def write(folder, table):
    (folder / VOCABULARY_FILE).write_text(json.dumps(table))
    return read_vocabulary(folder)


@pytest.mark.parametrize(
    ("prompt", "unknown"),
    [
        ("a Cat, an X-RAY", ("an",)),
        ("a spaceship 12 by a café, a spaceship", ("spaceship", "by", "café")),
        ("a cat BREAK a cat", ()),
        ("", ()),
    ],
)
def test_unknown_words_are_named_once_and_numbers_are_none(prompt, unknown):
    assert KNOWN.unknown_words(prompt) == unknown


def test_a_note_names_a_few_words_and_counts_the_rest():
    assert KNOWN.note("a cat") == ""
    assert KNOWN.note("a spaceship") == "it draws cats; it does not know 'spaceship': see words.txt"
    assert "'one', 'two', 'three', 'four', 'five' and 2 more:" in KNOWN.note("one two three four five six seven")
    assert f"'{'x' * 40}':" in KNOWN.note("x" * 20_000) and KNOWN.note("zwx", {"zwx": ""}) == ""


def test_a_folder_may_list_words_alone(tmp_path):
    assert read_vocabulary(tmp_path) is None and write(tmp_path, {"tokens": []}) is None
    vocabulary = write(tmp_path, {"words": ["Cat"]})
    assert (
        vocabulary.note("cat dog")
        == "the model knows few words; it does not know 'dog': see vocabulary.json in its folder"
    )


@pytest.mark.parametrize("table", [{"words": "cat"}, {"words": [1]}, {"words": [], "summary": 7}, []])
def test_a_damaged_list_is_refused_in_one_line(tmp_path, table):
    with pytest.raises(ModelError) as caught:
        write(tmp_path, table)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_shipped_model_knows_the_words_of_its_examples():
    vocabulary = read_vocabulary(config_folder("demo"))
    assert vocabulary.examples and not any(map(vocabulary.unknown_words, vocabulary.examples))


def test_results_and_previews_say_what_the_model_does_not_know(pipelines):
    pipe = pipelines["shallow"]
    assert vocabulary_of(pipe) is None
    editor = Editor.from_pretrained("demo")
    source = editor.generate("a (cat:1.2) on a beach", num_inference_steps=2, guidance_scale=4)
    assert source.stats.notes == ()
    note = "the shipped model draws cats and castles on beaches; it does not know 'spaceship': see weights/README.md"
    assert editor.preview("a spaceship on a beach").notes == (note,)
    assert note in editor.edit("a spaceship on a beach").stats.notes
