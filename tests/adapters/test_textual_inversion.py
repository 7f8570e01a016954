"""Words from files: embeddings are diffusers' own, and a word of several vectors is one word."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fisedit import Editor
from fisedit.adapters.textual_inversion import loaded
from fisedit.errors import AdapterError, InputError, SessionError
from fisedit.machine.device import weights_digest
from fisedit.metadata import provenance
from fisedit.prompts.chunks import split_chunks
from fisedit.prompts.text_diff import words
from fisedit.prompts.weighting import parse
from fisedit.sampling.engine import Engine
from tests.support.edits import config_of
from tests.support.pipelines import build_pipeline

QUICK = {"seed": 7, "num_inference_steps": 2}
MASK = np.eye(16, dtype=bool)


@pytest.fixture
def pipe():
    """A pipeline of its own, as words stay in it."""
    return build_pipeline("shallow")


def written(folder, name, pipe, vectors=3, key="emb_params", width=None):
    torch.manual_seed(len(name))
    width = width or pipe.text_encoder.config.hidden_size
    embeddings = torch.randn(vectors, width) if vectors else torch.randn(width)
    path = folder / f"{name}.safetensors"
    save_file({key: embeddings}, path)
    return path


@pytest.mark.parametrize("vectors", [0, 1, 3])
@pytest.mark.parametrize("key", ["emb_params", "<anything>"])
def test_embeddings_are_diffusers_own(pipe, tmp_path, vectors, key):
    path, theirs = written(tmp_path, "zwx", pipe, vectors, key), build_pipeline("shallow")
    assert Editor(pipe).load_textual_inversion(path) == "zwx"
    theirs.load_textual_inversion(load_file(path), token="zwx")
    with torch.inference_mode():
        ours = Engine(pipe).encode(config_of("a zwx cat", negative_prompt="zwx", guidance_scale=3.0)).text
        positive, negative = theirs.encode_prompt("a zwx cat", "cpu", 1, True, "zwx")
    assert torch.equal(ours, torch.cat([negative, positive]))


@pytest.mark.parametrize("names", [("clip_l", "clip_g"), ("text_encoders_0", "text_encoders_1")])
def test_a_word_of_two_text_encoders_is_diffusers_own(tmp_path, names):
    """Of Stable Diffusion XL; taken out, the model is as it was."""
    pipe, theirs = build_pipeline("sdxl"), build_pipeline("sdxl")
    pairs = ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2))
    tensors = {name: torch.randn(2, own.config.hidden_size) for name, (_, own) in zip(names, pairs, strict=True)}
    save_file(tensors, tmp_path / "zwx.safetensors")
    editor, engine, config = Editor(pipe), Engine(pipe), config_of("a zwx cat", negative_prompt="zwx")
    with torch.inference_mode():
        before = engine.encode(config)
    assert editor.load_textual_inversion(tmp_path / "zwx.safetensors") == "zwx"
    for name, number in zip(names, ("", "_2"), strict=True):
        own = {part: theirs.components[f"{part}{number}"] for part in ("tokenizer", "text_encoder")}
        theirs.load_textual_inversion({"zwx": tensors[name]}, token="zwx", **own)
    with torch.inference_mode():
        got = engine.encode(config)
        text, empty, pooled, empty_pooled = theirs.encode_prompt("a zwx cat", None, "cpu", 1, True, "zwx")
        assert torch.equal(got.text, torch.cat([empty, text]))
        assert torch.equal(got.added["text_embeds"], torch.cat([empty_pooled, pooled]))
        editor.unload_textual_inversion("zwx")
        assert torch.equal(engine.encode(config).key, before.key)


def test_words_of_other_models_are_refused_by_two_text_encoders(tmp_path):
    editor = Editor(build_pipeline("sdxl"))
    for tensors, line in (
        (
            {"emb_params": torch.ones(2, 24)},
            "for two text encoders .clip_l and clip_g., got emb_params",
        ),
        ({"clip_l": torch.ones(2, 24), "clip_g": torch.ones(2, 33)}, "as many vectors of widths 24 and 32"),
        ({"clip_l": torch.ones(2, 24), "clip_g": torch.ones(3, 32)}, "as many vectors of widths 24 and 32"),
    ):
        save_file(tensors, tmp_path / "zwx.safetensors")
        with pytest.raises(AdapterError, match=line):
            editor.load_textual_inversion(tmp_path / "zwx.safetensors")


def test_the_words_of_a_diffusers_file(pipe, tmp_path):
    width = pipe.text_encoder.config.hidden_size
    save_file({"<toy>": torch.ones(width)}, tmp_path / "learned_embeds.safetensors")
    save_file({"<a>": torch.zeros(width), "<b>": torch.ones(width)}, tmp_path / "two.safetensors")
    editor = Editor(pipe)
    assert editor.load_textual_inversion(tmp_path / "learned_embeds.safetensors") == "<toy>"
    assert editor.load_textual_inversion(tmp_path / "two.safetensors", "<b>") == "<b>"
    embeddings = pipe.text_encoder.get_input_embeddings().weight
    assert embeddings[pipe.tokenizer.convert_tokens_to_ids("<b>")].eq(1).all()


def test_a_word_of_several_vectors_is_one_word(pipe, tmp_path):
    Editor(pipe).load_textual_inversion(written(tmp_path, "EasyNeg", pipe))
    found = words("a (EasyNeg:1.2), easyneg cat", pipe.tokenizer)
    assert [word.text for word in found] == ["a", "easyneg", ",", "easyneg", "cat"]
    assert [word.tokens for word in found] == [(1,), (2, 3, 4), (5,), (6, 7, 8), (9,)]
    prompt = "a (EasyNeg:1.2), easyneg cat"
    assert [prompt[word.start : word.end] for word in found] == ["a", "EasyNeg", ",", "easyneg", "cat"]
    assert found[1].weight == 1.2
    first, second = split_chunks(parse("cat " * 74 + "easyneg cat"), pipe.tokenizer)
    assert first.text.split() == ["cat"] * 74 and second.text.split()[-1] == "cat"


def test_a_word_behind_comfyui_s_prefix_is_that_word(pipe, tmp_path):
    Editor(pipe).load_textual_inversion(written(tmp_path, "EasyNeg", pipe))
    prompts = ("a cat, easyneg", "a cat, (easyneg:1.3)")
    plain, weighted = (Engine(pipe).encode(config_of(prompt)).text for prompt in prompts)
    assert torch.equal(Engine(pipe).encode(config_of("a cat, embedding:EasyNeg.pt")).text, plain)
    assert torch.equal(Engine(pipe).encode(config_of("a cat, (embedding:easyneg:1.3)")).text, weighted)


def test_a_word_inside_a_longer_one_of_another_file_stays(pipe, tmp_path):
    editor = Editor(pipe)
    for name, vectors in (("neg", 2), ("easyneg", 1)):
        editor.load_textual_inversion(written(tmp_path, name, pipe, vectors))
    assert [word.tokens for word in words("easyneg neg ea\u017fyneg", pipe.tokenizer)][:2] == [(1,), (2, 3)]


def test_an_edit_by_such_a_word_and_its_record(pipe, tmp_path):
    editor = Editor(pipe, model="tiny")
    editor.load_textual_inversion(written(tmp_path, "zwx", pipe))
    source = editor.generate("a cat and a cake on a beach", **QUICK)
    assert source.config.textual_inversions == ()
    result = editor.edit("a zwx and a cake on a beach", mask=MASK, growth=1)
    assert not result.changed_outside(source) and (np.asarray(result.image) != np.asarray(source.image)).any()
    (name,) = result.config.textual_inversions
    assert name == f"zwx:{loaded(pipe)['zwx']}"
    editor.save(tmp_path / "session")
    again = Editor(build_pipeline("shallow"), model="tiny")
    again.load(tmp_path / "session")
    with pytest.raises(SessionError, match="was read with the textual inversions zwx:"):
        again.edit("a zwx and a house on a beach", mask=MASK, growth=1)
    again.load_textual_inversion(tmp_path / "zwx.safetensors")
    assert again.edit("a zwx and a house on a beach", mask=MASK, growth=1).config.textual_inversions == (name,)


def test_a_word_is_taken_out_with_all_its_vectors(pipe, tmp_path):
    editor, before = Editor(pipe), pipe.tokenizer("a zwx cat").input_ids
    width = pipe.text_encoder.get_input_embeddings().weight.shape
    editor.load_textual_inversion(written(tmp_path, "zwx", pipe))
    editor.unload_textual_inversion("ZWX")
    assert pipe.tokenizer("a zwx cat").input_ids == before and not loaded(pipe)
    assert pipe.text_encoder.get_input_embeddings().weight.shape == width
    with pytest.raises(AdapterError, match="no textual inversion of the word 'zwx' is loaded; loaded: none"):
        editor.unload_textual_inversion("zwx")


def test_a_picture_is_edited_only_while_its_words_are_read_as_they_were(pipe, tmp_path):
    editor, word = Editor(pipe), "x" * 40
    editor.load_textual_inversion(written(tmp_path, word, pipe, vectors=2))
    editor.generate(f"a {word} and a cake on a beach", **QUICK)
    editor.unload_textual_inversion(word)  # the tokenizer now makes many tokens of it
    with pytest.raises(SessionError, match=f"was read with the textual inversions {word}:"):
        editor.edit("a dog and a cake on a beach")
    editor.load_textual_inversion(tmp_path / f"{word}.safetensors")
    assert editor.edit("a dog and a cake on a beach", mask=MASK, growth=1).config.textual_inversions == ()


def test_what_is_wrong_is_one_line(pipe, tmp_path):
    editor, good = Editor(pipe), written(tmp_path, "zwx", pipe)
    (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:40])
    (tmp_path / "old.pt").write_bytes(b"PK\x03\x04")
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "two.safetensors")
    save_file({"clip_l": torch.zeros(2), "clip_g": torch.zeros(3)}, tmp_path / "xl.safetensors")
    save_file({"a": torch.zeros(2, 2, 2)}, tmp_path / "deep.safetensors")
    editor.load_textual_inversion(good)
    for name, token, line in [
        ("none.safetensors", None, "no such file"),
        ("cut.safetensors", None, "truncated or damaged"),
        ("old.pt", None, "weights must be .safetensors"),
        ("two.safetensors", None, "holds 2 words, or no textual inversion: "),
        ("xl.safetensors", None, "is a textual inversion for Stable Diffusion XL"),
        ("deep.safetensors", None, "must hold embeddings of words, got 1 other tensors"),
        (written(tmp_path, "wide", pipe, width=99).name, None, "for text encoders of width 99"),
        ("zwx.safetensors", None, "knows the word 'zwx' already"),
        ("zwx.safetensors", "cat", "knows the word 'cat' already"),
    ]:
        with pytest.raises(AdapterError, match=re.escape(line)) as caught:
            editor.load_textual_inversion(tmp_path / name, token)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="token must be text, got int"):
        editor.load_textual_inversion(good, token=3)
    with pytest.raises(AdapterError, match="no textual inversion of the word 3"):
        editor.unload_textual_inversion(3)
    for token in ("two words", "style_1"):
        with pytest.raises(InputError, match="token must be letters"):
            editor.load_textual_inversion(good, token)
    save_file({"a": torch.full((2, pipe.text_encoder.config.hidden_size), torch.nan)}, tmp_path / "nan.safetensors")
    with pytest.raises(AdapterError, match="holds numbers that are no embeddings"):
        editor.load_textual_inversion(tmp_path / "nan.safetensors")


def test_what_was_made_without_a_word_is_not_made_again_with_it(pipe, tmp_path):
    editor = Editor(pipe)
    editor.generate("a zwx and a cake on a beach", **QUICK)
    editor.load_textual_inversion(written(tmp_path, "zwx", pipe))
    editor.forget()
    with pytest.raises(SessionError, match="textual inversions none, which now are zwx:"):
        editor.edit("a cat and a cake on a beach", mask=MASK, growth=1)
    editor.unload_textual_inversion("zwx")
    editor.edit("a cat and a cake on a beach", mask=MASK, growth=1)


def test_a_picture_with_such_a_word_in_an_edit_is_not_made_again_without(pipe, tmp_path):
    editor = Editor(pipe, model="tiny")
    editor.load_textual_inversion(written(tmp_path, "zwx", pipe))
    editor.generate("a cat and a cake on a beach", **QUICK)
    editor.edit("a zwx and a cake on a beach", mask=MASK, growth=1)
    past = provenance.parse_origin(editor.metadata())
    assert past.edits[0].textual_inversions == editor.current.config.textual_inversions
    with pytest.raises(InputError, match="which its file does not hold"):
        provenance.source_arguments(past, {})


def test_pages_of_features_are_of_the_model_without_its_added_words(pipe, tmp_path):
    before = weights_digest(pipe)
    Editor(pipe).load_textual_inversion(written(tmp_path, "zwx", pipe))
    assert weights_digest(pipe) == before
