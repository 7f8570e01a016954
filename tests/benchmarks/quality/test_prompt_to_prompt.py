"""Dense prompt-to-prompt, by its limits."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import Attention

from benchmarks.quality.prompt_to_prompt import AttentionControl, prompt_to_prompt, unchanged_tokens
from tests.support import pipelines as tiny
from tests.support.edits import CAT
from tests.support.quality import fresh, levels


@pytest.mark.slow
def test_prompt_to_prompt_replacing_nothing_is_reprompting(generated, opened):
    for case in (generated, opened):
        assert levels(prompt_to_prompt(case, 0, 0), case.blended(case.everywhere)) <= 1
        assert levels(prompt_to_prompt(case), case.blended(case.everywhere)) > 10


def test_prompt_to_prompt_of_the_same_prompt_is_the_source(generated):
    assert levels(prompt_to_prompt(fresh(generated, prompt=CAT), 1, 1), generated.source.image) <= 1


def test_prompt_to_prompt_replaces_for_a_share_of_the_steps(generated):
    none, some, all_steps = (prompt_to_prompt(generated, 0, own) for own in (0, 2 / 7, 1))
    assert levels(some, none) > 10 and levels(some, all_steps) > 10


def test_prompt_to_prompts_source_stays_on_its_path(opened):
    seen = []
    watched = opened.editor.pipe.unet.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    prompt_to_prompt(opened)
    watched.remove()
    old, new, old_guided, new_guided = torch.stack(seen).unbind(1)
    assert torch.equal(old, torch.cat(opened.trajectory.latents[:-1])) and torch.equal(old, old_guided)
    assert torch.equal(new, new_guided) and not torch.equal(new[1:], old[1:])


def test_prompt_to_prompt_leaves_the_model_as_it_was(generated):
    layers = [m for m in generated.editor.pipe.unet.modules() if isinstance(m, Attention)]
    assert layers and not any("forward" in layer.__dict__ for layer in layers)


def test_unchanged_tokens_by_hand():
    pairs = unchanged_tokens("a cat on a beach", "a big dog on a beach", tiny.build_tokenizer())
    assert pairs[:5] == [(0, 0), (1, 1), (3, 4), (4, 5), (5, 6)]
    assert pairs[5:] == [(6 + k, 7 + k) for k in range(70)]
    back = unchanged_tokens("a big dog on a beach", "a cat on a beach", tiny.build_tokenizer())
    assert back[-2:] == [(76, 75), (76, 76)]


def test_attention_is_taken_from_the_source_for_its_share_of_steps():
    layer = Attention(8, heads=2, dim_head=4, cross_attention_dim=6).eval()
    hidden, text = torch.randn(4, 9, 8), torch.randn(4, 3, 6)
    control = AttentionControl([(0, 0), (2, 1)], cross_attention=2, self_attention=1)

    def maps(context: torch.Tensor) -> torch.Tensor:
        query, key = (layer.head_to_batch_dim(t) for t in (layer.to_q(hidden), layer.to_k(context)))
        return layer.get_attention_scores(query, key).unflatten(0, (4, 2))

    def out(probabilities: torch.Tensor) -> torch.Tensor:
        value = layer.head_to_batch_dim(layer.to_v(text))
        return layer.to_out[0](layer.batch_to_head_dim(probabilities.flatten(0, 1) @ value))

    with torch.inference_mode():
        expected = maps(text).clone()
        expected[3, ..., 0], expected[3, ..., 1] = expected[2, ..., 0], expected[2, ..., 2]
        torch.testing.assert_close(control.attend(layer, hidden, text), out(expected))
        own = Attention(8, heads=2, dim_head=4).eval()
        same = torch.cat([hidden[:3], hidden[2:3]])
        kept = control.attend(own, hidden)
        assert not torch.allclose(kept[3], own(hidden)[3])
        torch.testing.assert_close(control.attend(own, same), own(same))
        control.step = 1
        torch.testing.assert_close(control.attend(own, hidden), own(hidden))
        control.step = 2
        torch.testing.assert_close(control.attend(layer, hidden, text), layer(hidden, text))
