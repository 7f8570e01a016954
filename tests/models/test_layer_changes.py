"""Layers that were changed by hand are refused by name before anything runs: sparse steps would leave it out."""

from __future__ import annotations

import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from fisedit.costs.spans import recorded_spans
from fisedit.errors import UnsupportedModuleError
from fisedit.models.injection import Injection, injected
from fisedit.models.layer_changes import check_layers
from fisedit.sampling.engine import Engine
from fisedit.sparse.executor import Executor
from tests.support.pipelines import build_pipeline

CONV = "down_blocks.0.resnets.0.conv1"
BLOCK = "mid_block.attentions.0.transformer_blocks.0"
QUERY, NORM = f"{BLOCK}.attn2.to_q", f"{BLOCK}.norm2"


class OwnLinear(nn.Linear):
    """A layer that computes more than its weight says, as quantised ones do."""

    def forward(self, x):
        return super().forward(x) * 2


class Quantised(torch.Tensor):
    """A weight that is made when it is read."""


class OwnBlock(nn.Module):
    """A block of somebody else's."""


def hook(*_):
    """Changes nothing; nobody can know."""


def class_changed(module):
    module.__class__ = type(f"ToMe{type(module).__name__}", (type(module),), {})


def put(attribute):
    return lambda module: setattr(module, attribute, lambda *args: args[0])


def quantised(module):
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Quantised), requires_grad=False)


def compiled(unet, name):
    parent, _, child = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setattr(unet.get_submodule(parent), child, torch.compile(unet.get_submodule(name)))


CHANGES = {
    "hook": (CONV, lambda m: m.register_forward_hook(hook), r"a forward hook \(tests\S*\.hook\); remove it"),
    "hook of a block": ("mid_block", lambda m: m.register_forward_hook(hook), "a forward hook"),
    "pre-hook": (NORM, lambda m: m.register_forward_pre_hook(hook), "a forward hook"),
    "forward, as of LyCORIS' apply_to": (QUERY, put("forward"), "another forward .*merge it into the weights"),
    "forward of a block": ("up_blocks.1", put("forward"), "another forward"),
    "hook of accelerate": (
        CONV,
        lambda m: add_hook_to_module(m, ModelHook()),
        r"another forward \(accelerate\.hooks\.",
    ),
    "_conv_forward, as of tiling": (CONV, put("_conv_forward"), "another _conv_forward"),
    "old weight_norm": (QUERY, weight_norm, r"a forward hook \(torch\S*\.WeightNorm\)"),
    "weight_norm": (CONV, parametrizations.weight_norm, "parametrized"),
    "pruning": (CONV, lambda m: prune.l1_unstructured(m, "weight", 2), "a forward hook"),
    "class, as ToMe's": (BLOCK, class_changed, "ToMeBasicTransformerBlock"),
    "class of an attention": (f"{BLOCK}.attn1", class_changed, "ToMeAttention"),
    "class of a norm": (NORM, class_changed, "ToMeLayerNorm"),
    "class of a query": (QUERY, lambda m: setattr(m, "__class__", OwnLinear), "OwnLinear"),
    "quantised weight": (f"{BLOCK}.ff.net.2", quantised, "its weight is a Quantised"),
    "weights in 8 bits": ("conv_out", lambda m: m.to(torch.float8_e4m3fn), "its weight is of torch.float8_e4m3fn"),
    "weights of the time in 8 bits": (
        "mid_block.resnets.0.time_emb_proj",
        lambda m: m.to(torch.float8_e4m3fn),
        "its weight is of torch.float8_e4m3fn",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_change_is_refused_by_the_name_of_its_layer(pipelines):
    """Also where it comes after an executor was made."""
    healthy = pipelines["shallow"].unet
    for what, (name, change, words) in CHANGES.items():
        unet = deepcopy(healthy)
        executor = Executor(unet)
        executor.refresh()
        change(unet.get_submodule(name))
        for check in (executor.refresh, partial(Executor, unet)):
            with pytest.raises(UnsupportedModuleError, match=words) as caught:
                check()
            assert name in str(caught.value), what


@pytest.mark.slow
def test_a_compiled_layer_is_refused(pipelines):
    for name in (BLOCK, "down_blocks.0", QUERY):
        unet = deepcopy(pipelines["shallow"].unet)
        compiled(unet, name)
        with pytest.raises(UnsupportedModuleError, match=rf"{name} must .*torch.compile; give .*_orig_mod"):
            Executor(unet)
    with pytest.raises(UnsupportedModuleError, match="at its root"):
        Executor(torch.compile(unet))


def test_freeu_is_refused_and_goes_again():
    pipe = build_pipeline("shallow")
    engine = Engine(pipe)
    pipe.enable_freeu(0.9, 0.2, 1.2, 1.4)
    with pytest.raises(UnsupportedModuleError, match=r"layer up_blocks.0 .*FreeU.*; call pipe.disable_freeu\(\)"):
        engine.refresh()
    pipe.disable_freeu()
    engine.refresh()


def test_a_changed_decoder_is_refused():
    pipe = build_pipeline("shallow")
    engine, attention = Engine(pipe), pipe.vae.decoder.mid_block.attentions[0]
    handle = pipe.vae.decoder.up_blocks[3].resnets[0].conv1.register_forward_hook(hook)
    with pytest.raises(UnsupportedModuleError, match=r"VAE's layer decoder.up_blocks.3.resnets.0.conv1 .*hook"):
        engine.refresh()
    handle.remove()
    own, attention.processor = attention.processor, hook
    with pytest.raises(UnsupportedModuleError, match=r"mid_block.attentions.0"):
        engine.refresh()
    attention.processor = own
    engine.refresh()


def test_what_the_package_itself_puts_in_is_no_change(pipelines):
    """Injections over one another, and the hooks that measure; a forward of somebody else's under them is one."""
    pipe = pipelines["shallow"]
    unet = pipe.unet
    layer = unet.get_submodule(CONV)
    around = Injection(unet, [(layer, lambda inner: partial(hook, inner))])
    with recorded_spans(pipe), injected(unet, [(layer, hook)]), around:
        check_layers(unet, "UNet")
    layer.forward = hook
    try:
        with around, pytest.raises(UnsupportedModuleError, match="another forward"):
            check_layers(unet, "UNet")
    finally:
        del layer.forward
    check_layers(unet, "UNet")


def test_another_layer_in_the_place_of_one_is_used(pipelines):
    """A layer that was exchanged after an executor was made."""
    unet = deepcopy(pipelines["shallow"].unet)
    executor = Executor(unet)
    other = unet.mid_block.resnets[0].conv1 = deepcopy(unet.mid_block.resnets[0].conv1)
    assert executor.refresh() and not executor.refresh()
    assert other in [site.module for site in executor.sites]
