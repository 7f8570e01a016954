"""The walk over a UNet's layers: what has no exact sparse counterpart is refused by its name, before anything runs."""

from __future__ import annotations

import pytest
from diffusers.models.downsampling import Downsample2D
from diffusers.models.unets.unet_2d_blocks import DownBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

from fisedit.errors import UnsupportedModuleError
from fisedit.features.sites import Role, base_layer, num_levels, unet_sites, weight_of
from tests.support.pipelines import build_pipeline

BLOCK = "mid_block.attentions.0.transformer_blocks.0"


class OtherBlock(DownBlock2D):
    """A block that may do anything."""


@pytest.fixture
def unet():
    """A UNet of its own, to be spoilt."""
    return build_pipeline("shallow").unet


def put(unet, name, module):
    parent, _, child = name.rpartition(".")
    setattr(unet.get_submodule(parent), child, module)


def refused(unet, *words):
    with pytest.raises(UnsupportedModuleError) as caught:
        unet_sites(unet)
    assert all(word in str(caught.value) for word in (*words, "Stable Diffusion 1.x, 2.x or XL")), caught.value


def test_a_block_of_another_class(unet):
    unet.down_blocks[0].__class__ = OtherBlock
    refused(unet, "layer down_blocks.0 is a OtherBlock")


def test_a_block_with_a_layer_of_its_own(unet):
    unet.mid_block.gate = nn.Linear(2, 2)
    refused(unet, "mid_block.gate is a Linear")


@pytest.mark.parametrize(
    ("owner", "name", "value", "words"),
    [
        ("mid_block.resnets.0", "upsample", nn.Identity(), "it resamples"),
        ("mid_block.attentions.0", "is_input_continuous", False, "its input is not continuous"),
        (BLOCK, "norm_type", "ada_norm", f"{BLOCK} is a BasicTransformerBlock"),
        (f"{BLOCK}.attn1", "fused_projections", True, "it has norms, added or fused projections"),
        (f"{BLOCK}.attn2", "norm_cross", nn.LayerNorm(4), "it has norms, added or fused projections"),
    ],
)
def test_a_layer_that_works_in_another_way(unet, owner, name, value, words):
    setattr(unet.get_submodule(owner), name, value)
    refused(unet, owner, words)


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("down_blocks.0.downsamplers.0", Downsample2D(24), "a padded 3x3 conv of stride 2"),
        ("up_blocks.0.upsamplers.0", Upsample2D(64), "nearest interpolation and a 3x3 conv"),
        ("mid_block.resnets.0.norm1", nn.LayerNorm(64), "is a LayerNorm"),
        ("mid_block.attentions.0.proj_in", nn.Conv2d(64, 64, 3, padding=1), "is a Conv2d"),
        ("conv_out", nn.Conv2d(24, 4, 3, padding=1, padding_mode="reflect"), "not a padded 3x3 conv"),
    ],
)
def test_a_layer_in_the_place_of_another(unet, name, module, words):
    put(unet, name, module)
    refused(unet, name, words)


def test_what_a_unet_may_lack(unet):
    """Cross-attention alone, no middle, no last norm: their sites are left out, and the others stay."""
    before = [site.name for site in unet_sites(unet)]
    unet.get_submodule(BLOCK).attn1 = None
    without = {name for name in before if name.startswith(f"{BLOCK}.attn1")}
    assert without and [site.name for site in unet_sites(unet)] == [name for name in before if name not in without]
    unet.mid_block = unet.conv_norm_out = None
    sites = unet_sites(unet)
    left = [name for name in before if not name.startswith("mid_block") and name != "conv_norm_out"]
    assert [site.name for site in sites] == left and num_levels(sites) == 3
    assert sites[0].role is sites[-1].role is Role.CONV and sites[-1].level == 0


def test_the_weight_of_a_bare_layer_is_its_own():
    layer = nn.Linear(3, 2)
    assert weight_of(layer) is layer.weight and base_layer(layer) is layer


def test_the_weight_of_a_layer_of_another_class_is_its_own():
    class Own(nn.Linear):
        pass

    layer = Own(3, 2)
    assert weight_of(layer) is layer.weight
