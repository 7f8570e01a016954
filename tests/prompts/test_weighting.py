"""Prompt weights: reading them, embeddings against compel's own front door, and edits that change a weight alone."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compel import Compel, EmbeddingsProvider
from hypothesis import assume, example, given, settings

from fisedit import Editor
from fisedit.errors import InputError
from fisedit.prompts.chunks import split_chunks
from fisedit.prompts.embeddings import embeddings
from fisedit.prompts.text_diff import words
from fisedit.prompts.weighting import MAX_WEIGHT, clamped_notes, parse
from fisedit.sampling.engine import Engine
from fisedit.values import EditKind, MaskSource
from tests.support.edits import CAT, Calls, config_of, pixels_outside
from tests.support.pipelines import build_pipeline
from tests.support.prompts import PROMPTS

WEIGHTED_CAT = "a (cat:1.4) and a cake on a beach"
QUICK = {"seed": 7, "num_inference_steps": 3}
AS_COMPEL = [
    (WEIGHTED_CAT, "a (cat)1.4 and a cake on a beach"),
    ("a (cat) and a [cake] on a beach", "a (cat)1.1 and a (cake)0.9091 on a beach"),
    ("a (cat:0.5) and a (cake:0.25)", "a (cat)0.5 and a (cake)0.25"),
    ("a (big (red cat:1.2):1.5) in snow", "a (big)1.5 (red cat)1.8 in snow"),
    ("(a cat:0)", "(a cat)0"),
    ("(red:0.7) (cat:0.7) on a beach", "(red cat)0.7 on a beach"),
    (r"a (\(red\) cat:1.3)", r"a (\(red\) cat)1.3"),
    ("(red house:1.2) " + "big " * 90, "(red house)1.2 " + "big " * 90),
    ("big " * 74 + "(red house:0.5)", "big " * 74 + "(red house)0.5"),
    ("big " * 75 + "(house:0.5)", "big " * 75 + "(house)0.5"),
]
PLAIN = [
    "a cat and a cake on a beach",
    "",
    "a cat, (a dog",
    "a cat] :) a [dog :1.3)",
    r"C:\cats and dogs\x",
    "İ é 🐱 <|startoftext|> ½",
]


def test_reading():
    for prompt, expected in [
        ("a (cat:1.4) b", [("a", 1), ("cat", 1.4), ("b", 1)]),
        ("(cat)[dog]", [("cat", 1.1), ("dog", 0.9091)]),
        ("a <lora:(ink:1.5)>(cat) <lyco:b>", [("a", 1), ("cat", 1.1)]),
        ("((a) (b:2))", [("a", 1.21), ("b", 2.2)]),
        ("([a])", [("a", 1)]),
        ("(a [b) c]", [("a", 1.1), ("b", 1), ("c", 0.9091)]),
        ("(a : +.5 )", [("a", 0.5)]),
        ("(a:1.2, b:1.3)", [("a:1.2,", 1.3), ("b", 1.3)]),
        ("(a:-1) (b:1e5) (c:99)", [("a", 0), ("b:1e5", 1.1), ("c", MAX_WEIGHT)]),
        ("((" * 300 + "a:9" + "))" * 300, [("a", MAX_WEIGHT)]),
        ("[a:0.5]", [("a:0.5", 0.9091)]),
        (r"\(a\) \[b\] \\ \c", [("(a)", 1), ("[b]", 1), ("\\", 1), (r"\c", 1)]),
        (r"(a\):2)", [("a)", 2)]),
        (")a( b :1.3) ]:[", [(")a", 1), ("b", 1.3), ("]:[", 1)]),
        ("c(at)s :) (:", [("c", 1), ("at", 1.1), ("s", 1), (":)", 1), ("(:", 1)]),
        ("() [] (:2)", []),
        ("<|startoftext|> (a)", [("a", 1.1)]),
        ("<|startoftext|> a", [("<|startoftext|>", 1), ("a", 1)]),
        ("\ud800 x", [("\ufffd", 1), ("x", 1)]),
    ]:
        read = parse(prompt)
        chunks = [(match[0], set(read.weights[slice(*match.span())])) for match in re.finditer(r"\S+", read.text)]
        assert chunks == [(text, {weight}) for text, weight in expected]
        assert len(read.prompt_positions) == len(read.weights) == len(read.text)
        assert all(c in (prompt[i], " ", "\ufffd") for i, c in zip(read.prompt_positions, read.text, strict=True))


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a (cat:-1) at (12:30), (dog:10) (:-.5)", ["(cat:-1)", "(12:30)", "(:-.5)"]),
        ("a (big (red:4) cat:5) b", ["red"]),
        ("a (cat:0) ((cat)) [dog]", []),
        ("(a:11)" * 5000, ["(a:11)"]),
    ],
)
def test_weights_that_are_clamped_are_told(prompt, parts):
    found = [note.partition(", whose weight is not in [0, 10]")[0] for note in clamped_notes(parse(prompt))]
    assert found == [f"the prompt has {part}" for part in parts]


def test_many_brackets_are_read_at_once():
    assert parse("(" * 50_000 + ")" * 50_000).text.isspace()
    assert parse("(" * 50_000 + ":" + "1" * 50_000).text.count("(") == 50_000


@pytest.mark.sweep(1)
@pytest.mark.parametrize("shape", ["sd15", "sd2"])
@pytest.mark.parametrize(("prompt", "theirs"), AS_COMPEL, ids=lambda v: v[:30])
def test_embeddings_are_compels_own(pipelines, shape, prompt, theirs):
    pipe = pipelines[shape]
    with torch.inference_mode():
        expected = Compel(pipe.tokenizer, pipe.text_encoder, truncate_long_prompts=False)(theirs)
        got = Engine(pipe).encode(config_of(prompt, negative_prompt="a dog")).text
        negative = Engine(pipe).encode(config_of("a dog", negative_prompt=prompt)).text
        dog, _ = pipe.encode_prompt("a dog", "cpu", 1, False)
    assert got.shape == (2, *expected.shape[1:])
    torch.testing.assert_close(got[1:], expected, rtol=0, atol=1e-6)
    assert torch.equal(got[:1, :77], dog)
    assert torch.equal(negative, got.flip(0))


@pytest.mark.parametrize("prompt", PLAIN, ids=lambda v: v[:20].encode("ascii", "replace").decode())
def test_without_weights_they_are_diffusers_own(pipelines, prompt):
    pipe = pipelines["sd15"]
    with torch.inference_mode():
        positive, negative = pipe.encode_prompt(prompt, "cpu", 1, True, "a dog")
        assert torch.equal(Engine(pipe).encode(config_of("cat", negative_prompt=prompt)).text[:1], positive)
        if prompt:
            got = Engine(pipe).encode(config_of(prompt, negative_prompt="a dog")).text
            assert torch.equal(got, torch.cat([negative, positive]))


@pytest.mark.parametrize(
    ("prompt", "same"),
    [
        ("a (cat:1.0) and [(a cake)] on a beach", CAT),
        (r"a \(cat\)", "a (cat)"),
        ("a cat () [] (:1.3)", "a cat"),
    ],
)
def test_weights_of_one_change_nothing(pipelines, prompt, same):
    pipe = pipelines["sd15"]
    with torch.inference_mode():
        got = Engine(pipe).encode(config_of(prompt, guidance_scale=1.0)).text
        assert torch.equal(got, pipe.encode_prompt(same, "cpu", 1, False)[0])


def test_weights_near_one_hardly_change_anything(pipelines):
    pipe = pipelines["sd15"]
    with torch.inference_mode():
        plain = pipe.encode_prompt(CAT, "cpu", 1, False)[0]
        near, far = (embeddings(parse(f"a (cat:{w}) and a cake on a beach"), pipe) for w in (1.0001, 1.4))
    assert 0 < (near - plain).abs().max() < 1e-2 < 0.1 < (far - plain).abs().max()


def test_embeddings_in_half_precision():
    pipe = build_pipeline("demo").to(torch.bfloat16)
    with torch.inference_mode():
        made = embeddings(parse("a (cat:1.4) and a (dog:0.6)"), pipe)
    assert made.dtype == torch.bfloat16 and made.isfinite().all()


@settings(max_examples=100, deadline=None)
@given(PROMPTS)
@example("<|startoftext|> a cat [a dog]")
def test_any_string_is_encoded_and_its_words_know_their_tokens(pipelines, prompt):
    pipe, read = pipelines["demo"], parse(prompt)
    assume(len(split_chunks(read, pipe.tokenizer)) == 1)  # diffusers reads one
    ids = pipe.tokenizer(read.text, padding="max_length", truncation=True).input_ids
    fragments = read.fragments(pipe.tokenizer)
    fed, weights, _ = EmbeddingsProvider(pipe.tokenizer, pipe.text_encoder).get_token_ids_and_expand_weights(
        [text for text, _ in fragments], [weight for _, weight in fragments], device="cpu"
    )
    assert fed.tolist() == ids
    for word in words(prompt, pipe.tokenizer):
        alone = pipe.tokenizer(word.text, add_special_tokens=False).input_ids
        assert [ids[i] for i in word.tokens] == alone[: len(word.tokens)]
        assert [float(weights[i]) for i in word.tokens] == pytest.approx([word.weight] * len(word.tokens))
    with torch.inference_mode():
        made = embeddings(read, pipe)
    assert made is None or (made.shape == (1, 77, 32) and made.isfinite().all())


@pytest.mark.parametrize("shape", ["sd15", "sd2"])
def test_a_changed_weight_is_a_sparse_edit_at_its_word(pipelines, shape):
    editor = Editor(pipelines[shape])
    source = editor.generate(CAT, **QUICK | {"seed": 3})  # with which random weights point at a part
    with Calls(editor.pipe.unet) as calls:
        result = editor.edit(WEIGHTED_CAT, growth=0)
    (hunk,) = result.diff.hunks
    assert result.diff.kind is hunk.kind is EditKind.REWEIGHT
    assert [w.tokens for w in hunk.focus_old] == [w.tokens for w in hunk.focus_new] == [(2,)]
    assert result.mask.source is MaskSource.ATTENTION and 0 < result.mask.area < 0.5
    assert calls.dense == 0 and calls.sparse >= 3
    assert pixels_outside(result, source)
    assert np.any(np.asarray(result.image) != np.asarray(source.image))


def test_the_same_words_and_weights_are_no_edit(pipelines):
    editor = Editor(pipelines["shallow"])
    editor.generate(WEIGHTED_CAT, **QUICK)
    with Calls(editor.pipe.unet) as calls:
        assert editor.edit("a (cat:1.40) and a cake on a [(beach)]").diff.kind is EditKind.IDENTICAL
    assert calls.dense == calls.sparse == 0


def test_syntax_takes_none_of_the_encoders_tokens(pipelines):
    engine = Engine(pipelines["shallow"])
    with torch.inference_mode():
        lengths = [engine.encode(config_of("(big:1.01) " * count)).text.shape[1] for count in (75, 76)]
    assert lengths == [77, 154]


@pytest.mark.parametrize("skipped", [0, 1])
def test_layers_are_left_out_as_diffusers_does(pipelines, skipped, monkeypatch):
    """Whose code looks for the norm where transformers 4 had it. The negative prompt has layers of its own."""
    pipe = pipelines["shallow"]
    with torch.no_grad():
        ours = Engine(pipe).encode(config_of(negative_prompt="snow", guidance_scale=3.0, clip_skip=skipped)).text
        both = config_of(negative_prompt="snow", guidance_scale=3.0, clip_skip=skipped, negative_clip_skip=skipped)
        as_web_uis = Engine(pipe).encode(both).text
        model = SimpleNamespace(final_layer_norm=pipe.text_encoder.final_layer_norm)
        monkeypatch.setitem(vars(pipe.text_encoder), "text_model", model)
        prompt, negative = pipe.encode_prompt(CAT, "cpu", 1, True, "snow", clip_skip=skipped or None)
        snow, _ = pipe.encode_prompt("snow", "cpu", 1, False, clip_skip=skipped or None)
    assert torch.equal(ours, torch.cat([negative, prompt])) and torch.equal(as_web_uis, torch.cat([snow, prompt]))


def test_weights_are_applied_to_what_fewer_layers_give(pipelines):
    pipe = pipelines["shallow"]
    with torch.no_grad():
        plain, weighted, all_layers = (
            Engine(pipe).encode(config_of(text, guidance_scale=1.0, clip_skip=skipped)).text
            for text, skipped in (("a cat", 1), ("a (cat:1.5)", 1), ("a (cat:1.5)", 0))
        )
    moved = (weighted - plain).abs().amax(-1)[0]
    assert moved[2] > 1e-3 and float(moved[1]) == 0 and not torch.allclose(weighted, all_layers)


def test_some_layer_must_stay(pipelines):
    with pytest.raises(InputError, match="clip_skip must leave a layer of the text encoder's 2, got 2"):
        Engine(pipelines["shallow"]).encode(config_of(clip_skip=2))
