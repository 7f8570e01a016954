"""Long prompts in chunks: where web UIs cut them, and embeddings that are compel's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compel import Compel

from fisedit import Editor
from fisedit.prompts.chunks import MAX_CHUNKS, split_chunks
from fisedit.prompts.text_diff import words
from fisedit.prompts.weighting import parse
from fisedit.sampling.engine import Engine
from fisedit.values import EditKind
from tests.support import oracle
from tests.support.edits import FP32, config_of, latents, record, replay

ROOM = 75
LONG = " ".join(["a cat and a cake on a beach with a tree"] * 10)
"""A hundred tokens without a comma."""


def texts(prompt, pipe):
    return [chunk.text.strip() for chunk in split_chunks(parse(prompt), pipe.tokenizer)]


@pytest.fixture
def pipe(pipelines):
    return pipelines["shallow"]


def test_what_fits_is_left_as_it_is(pipe):
    for prompt in ("", "  a  (cat) ", " ".join(["cat"] * ROOM)):
        parsed = parse(prompt)
        assert split_chunks(parsed, pipe.tokenizer) == (parsed,)


def test_a_full_chunk_ends_between_words(pipe):
    assert [len(text.split()) for text in texts(" ".join(["cat"] * 160), pipe)] == [75, 75, 10]
    spelled = " ".join(["cat"] * 74) + " zzzz cat"  # four tokens, for which one is left
    assert texts(spelled, pipe)[1] == "zzzz cat"


@pytest.mark.parametrize(("behind", "moved"), [(19, 19), (20, 0)])
def test_a_full_chunk_ends_behind_a_near_comma(pipe, behind, moved):
    before = ROOM - 1 - behind
    prompt = f"{' '.join(['cat'] * before)}, {' '.join(['dog'] * (behind + 5))}"
    assert len(texts(prompt, pipe)[1].split()) == moved + 5


def test_a_word_longer_than_a_chunk_is_cut_off_and_the_user_told(pipe, capfd):
    said = Editor(pipe).generate("a cat " + "z" * 700, num_inference_steps=1).stats.notes
    assert "a word of the prompt has more than 75 tokens, and its end is not read; shorten it" in said
    assert "truncated" not in capfd.readouterr().err
    assert not any("tokens" in note for note in Editor(pipe).generate("a cat", num_inference_steps=1).stats.notes)


def test_break_begins_a_chunk(pipe):
    assert texts("a cat BREAK a dog BREAK", pipe) == ["a cat", "a dog"]
    assert texts("BREAK a cat,BREAK, a dog", pipe) == ["", "a cat,", ", a dog"]
    assert texts("a BREAKER, break", pipe) == ["a BREAKER, break"]


def test_what_is_not_read_is_one_chunk(pipe):
    assert len(texts("BREAK " * 16_000, pipe)) == MAX_CHUNKS + 1
    assert len(texts("cat " * 75 * MAX_CHUNKS, pipe)) == MAX_CHUNKS


def test_embeddings_of_a_long_prompt_are_compels(pipe):
    """compel cuts inside words and at no comma; this prompt has neither."""
    theirs = Compel(tokenizer=pipe.tokenizer, text_encoder=pipe.text_encoder, truncate_long_prompts=False)
    with torch.no_grad():
        expected = torch.cat(theirs.pad_conditioning_tensors_to_same_length([theirs("no snow"), theirs(LONG)]))
        ours = Engine(pipe).encode(config_of(LONG, negative_prompt="no snow", guidance_scale=3.0)).text
    assert ours.shape == (2, 154, pipe.text_encoder.config.hidden_size)
    assert torch.allclose(ours, expected, atol=1e-5)


def test_words_behind_the_first_chunk_have_their_positions(pipe):
    found = words(f"{LONG} BREAK a (dog:1.3)", pipe.tokenizer)
    assert found[-1].tokens == (2 * 77 + 2,) and found[-1].weight == 1.3 and found[0].tokens == (1,)
    assert found[75].tokens == (78,)


def test_an_edit_behind_the_first_chunk_is_one(pipe):
    editor = Editor(pipe)
    source = editor.generate(f"{LONG} and a dog", num_inference_steps=2)
    result = editor.edit(f"{LONG} and a bird", growth=1)
    assert result.diff.kind is EditKind.REPLACE and result.diff.hunks[0].new[0].tokens == (115,)
    assert (np.asarray(result.image) != np.asarray(source.image)).any() and not result.changed_outside(source)


def test_a_prompt_may_become_longer_than_a_chunk(pipe):
    """Sparse everywhere it is diffusers' dense edit, whose embeddings are compel's."""
    engine, long = Engine(pipe), f"a dog on a beach {LONG}"
    source = record(engine, config_of())
    got = latents(replay(engine, source, long, np.ones((16, 16), bool), (0,) * 4))
    config = config_of(long)
    with torch.no_grad():
        negative, positive = engine.encode(config).text.chunk(2)
        dense = pipe(
            prompt_embeds=positive,
            negative_prompt_embeds=negative,
            height=config.height,
            width=config.width,
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale,
            generator=torch.Generator().manual_seed(config.seed),
            output_type="latent",
        ).images
    assert oracle.deviation(got[-1:], dense) <= FP32


def test_edits_of_a_batch_may_have_prompts_of_other_lengths(pipe):
    editor = Editor(pipe)
    editor.generate("a cat and a cake on a beach", num_inference_steps=2)
    prompts, mask = ["a dog and a cake on a beach", f"a dog and a cake on a beach {LONG}"], np.eye(16, dtype=bool)
    together = editor.edit_many(prompts, [mask, mask])
    for prompt, result in zip(prompts, together, strict=True):
        editor.checkout(result.parent)
        assert np.array_equal(np.asarray(editor.edit(prompt, mask=mask).image), np.asarray(result.image))


def test_what_is_not_read_is_told(pipe):
    (note,) = Editor(pipe).generate(LONG * 7, num_inference_steps=1).stats.notes
    assert note == "the prompt is longer than 8 chunks of 75 tokens, and the rest is not read; shorten it"
