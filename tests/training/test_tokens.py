"""The tokenizer knows the scenes' words whole and never fails on others."""

from pathlib import Path

import numpy as np
import pytest
from transformers import CLIPTokenizer

from benchmarks.scenes.layout import sample_scene
from benchmarks.scenes.prompts import describe_scene, prompt_words
from training.latents import PARTS
from training.tokens import LENGTH, build_tokenizer, encode, is_one_token, learn_merges, token_positions


def test_every_word_of_a_scene_is_one_token() -> None:
    tokenizer = build_tokenizer()
    assert [tokenizer.tokenize(word) for word in prompt_words()] == [[f"{word}</w>"] for word in prompt_words()]


def test_a_tokenizer_of_fewer_words_spells_the_others() -> None:
    known = ("a", "cat", "on", "beach", "snow")
    tokenizer = build_tokenizer(known)
    assert tuple(word for word in prompt_words() if is_one_token(word, tokenizer)) == tuple(
        word for word in prompt_words() if word in known
    )
    assert tokenizer("a cat on")["input_ids"] == build_tokenizer()("a cat on")["input_ids"]


def test_later_words_do_not_break_up_earlier_ones() -> None:
    merges = learn_merges(("castle", "star", "cast"))
    assert merges[:2] == [("c", "a"), ("ca", "s")]
    assert len(merges) == len(set(merges))


@pytest.mark.parametrize("text", ["a zebra on mars!", "ünïcode 猫 🙂", "don't 123"])
def test_any_text_survives_the_round_trip(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == text.replace(" ", "")


def test_rows_are_padded_by_the_end_token() -> None:
    tokenizer = build_tokenizer()
    row = encode(["a cat"])[0]
    assert len(row) == LENGTH
    assert row[0] == tokenizer.bos_token_id
    assert row[3:] == [tokenizer.eos_token_id] * (LENGTH - 3)


def test_positions_are_those_of_the_objects_tokens() -> None:
    tokenizer = build_tokenizer()
    scenes = [sample_scene(np.random.default_rng(seed)) for seed in range(300)]
    sentences = [describe_scene(scene) for scene in scenes]
    for scene, sentence, row in zip(scenes, sentences, encode([s.text for s in sentences]), strict=True):
        found = token_positions(sentence)
        assert tuple(tokenizer.decode([row[index]]).strip() for index in found) == scene.words
        assert row[len(sentence.text.replace(",", " ,").split()) + 1] == tokenizer.eos_token_id
        assert len(found) <= PARTS
    assert {len(scene.parts) for scene in scenes} >= {1, 2, 3, 4, 5}


def test_a_saved_tokenizer_comes_back_the_same(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    again = CLIPTokenizer.from_pretrained(tmp_path)
    assert again("a cat and a zebra")["input_ids"] == build_tokenizer()("a cat and a zebra")["input_ids"]
    assert again.model_max_length == LENGTH
