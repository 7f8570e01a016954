"""The modules compute what HelloMeme's public ones do: same inputs, same outputs, for weights made by recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fisedit.adapters.base import inject_adapters, map_changes
from fisedit.adapters.hellomeme.cross_attention import MapToTokens
from fisedit.adapters.insertion_points import inject_maps, insertion_points, record_maps
from fisedit.adapters.row_column.attention import RowColumnBlock, TwoStageBlock
from fisedit.adapters.row_column.checkpoints import fresh_adapter
from fisedit.adapters.row_column.reader import ReferenceCondition
from fisedit.adapters.row_column.variants import FAMILIES
from fisedit.errors import InputError
from tests.support.adapters import filled, lively, naive

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "hellomeme"
TOLERANCE = {"atol": 1e-4, "rtol": 0}


def fixture(name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(FIXTURES / f"{name}.safetensors")


def names(file: str, start: str) -> dict[str, list[int]]:
    keys = json.loads((FIXTURES / f"{file}.keys.json").read_text())
    return {key.removeprefix(start): shape for key, shape in keys.items() if key.startswith(start)}


BLOCKS = {
    "ska_v1": lambda: RowColumnBlock(32, 8, table=True),
    "ska_v3": lambda: RowColumnBlock(32, 8, table=True),
    "ska_v5": lambda: RowColumnBlock(32, 8),
    "stk_ref_v5b": lambda: TwoStageBlock(32, 8),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_the_public_one(name):
    block, given = filled(BLOCKS[name]()), fixture(name)
    own = {key: list(value.shape) for key, value in block.state_dict().items()}
    assert own == {k: s for k, s in names(name, "m:").items() if not k.startswith("time_emb_proj.")}
    got = given["in.hidden"] + block(given["in.hidden"], block.read(given["in.ref"]))
    assert torch.allclose(got, given["out.y"], **TOLERANCE)


def test_the_map_to_tokens_block_is_the_public_one():
    block, given = filled(MapToTokens(16, 32, 24)), fixture("sk_cross")
    assert {key: list(value.shape) for key, value in block.state_dict().items()} == names("sk_cross", "m:")
    assert torch.allclose(block(given["in.x"], given["in.e"]), given["out.y"], **TOLERANCE)


def unet():
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64, 96, 96),
        layers_per_block=2,
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=8,
    )


class Public:
    """A fixture's UNet, adapter, inputs and outputs."""

    def __init__(self, name):
        self.unet = filled(unet(), "unet.")
        self.given = {k: v[:, :, 0] if v.ndim == 5 else v for k, v in fixture(name).items()}
        family = FAMILIES[name.removeprefix("unet_")]
        self.adapter = lively(self.unet, family.name, "ad.", heads=8)
        self.text = self.given["in.text"]
        controls = {k.removeprefix("in.ctrl."): v for k, v in self.given.items() if k.startswith("in.ctrl.")}
        self.controls = {re.sub(r"(down|up)\w*_(\d)", r"\1_\2", k): v for k, v in controls.items()}
        self.seen = record_maps(self.unet, self.given["in.ref_latent"], self.text, tuple(insertion_points(self.unet)))
        self.conditions = [ReferenceCondition(self.adapter, self.adapter.read(self.seen))]

    @torch.no_grad()
    def eps(self, *, reference: bool, control: bool):
        with inject_adapters(self.unet, self.conditions if reference else [], self.controls if control else None):
            return self.unet(self.given["in.latent"], 500, self.text)[0]


@pytest.fixture(scope="module", params=["unet_v1", "unet_v2", "unet_v5"])
def public(request):
    return Public(request.param)


@pytest.mark.parametrize(
    ("name", "reference", "control"),
    [("eps", True, True), ("eps_refonly", True, False), ("eps_ctrlonly", False, True), ("eps_plain", False, False)],
)
def test_a_unet_is_guided_as_the_public_one(public, name, reference, control):
    assert len(public.controls) == sum(key.startswith("in.ctrl.") for key in public.given)
    got = public.eps(reference=reference, control=control)
    assert torch.allclose(got, public.given[f"out.{name}"], **TOLERANCE)


def test_every_tap_is_the_public_one(public):
    cached = {k.removeprefix("out.cache."): v for k, v in public.given.items() if k.startswith("out.cache.")}
    assert len(cached) >= 7
    for name, expected in cached.items():
        assert torch.allclose(public.seen[name], expected, **TOLERANCE), name


SIZES = [(8, 8), (6, 10), (5, 3)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_block_at_any_size_is_plain_attention(name, size):
    """Against softmax written out, over both maps side by side."""
    family = FAMILIES[name]
    block = filled(TwoStageBlock(16, 4) if family.two_stage else RowColumnBlock(16, 4, table=family.table), name)
    x, reference = torch.randn(2, 2, 16, *size)
    expected = naive(block, x, reference)
    assert torch.allclose(block(x, block.read(reference)), expected, **TOLERANCE)
    assert expected.std() > 0.1


def test_a_fresh_adapter_changes_nothing_and_can_learn(pipelines):
    base = pipelines["sd15"].unet
    x, text = torch.randn(2, 4, 16, 16), torch.randn(2, 11, base.config.cross_attention_dim)
    with torch.no_grad():
        plain = base(x, 500, text)[0]
    for family in FAMILIES.values():
        adapter = fresh_adapter(base, family.name)
        seen = record_maps(base, x, text, tuple(adapter.channels))
        with inject_adapters(base, [ReferenceCondition(adapter, adapter.read(seen))]):
            out = base(x, 500, text)[0]
        assert torch.equal(out, plain)
        weights = {name: p for name, p in adapter.named_parameters() if ".proj." in name and "attn_ref" not in name}
        gradients = torch.autograd.grad(out.square().mean(), weights.values())
        assert all(gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("name", ["v1", "v3"])
def test_stored_positions_end(name):
    block = RowColumnBlock(16, 4, table=True)
    assert block.read(torch.randn(1, 16, 64, 64)).size == (64, 64)
    with pytest.raises(InputError, match=r"up to 512 pixels a side, got a feature map of 72x64"):
        block.read(torch.randn(1, 16, 64, 72))


def test_guides_add_up_in_any_order(pipelines):
    base = pipelines["demo"].unet
    x, text = torch.randn(1, 4, 16, 16), torch.randn(1, 11, base.config.cross_attention_dim)
    made = []
    for salt, scale in (("a", 0.5), ("b", 2.0)):
        adapter = lively(base, "v3", salt)
        seen = record_maps(base, torch.randn_like(x), text, tuple(adapter.channels))
        made.append(ReferenceCondition(adapter, adapter.read(seen), scale))
    with torch.no_grad():
        outs = []
        for conditions in (made, made[::-1], made[:1], []):
            with inject_adapters(base, conditions):
                outs.append(base(x, 500, text)[0])
        m = torch.randn(1, insertion_points(base)["up_0"].channels, 4, 4)
        both, each = map_changes(made)["up_0"](m), [map_changes([g])["up_0"](m) - m for g in made]
    assert torch.allclose(outs[0], outs[1], **TOLERANCE)
    assert not torch.allclose(outs[0], outs[2], **TOLERANCE) and not torch.allclose(outs[2], outs[3], **TOLERANCE)
    assert torch.allclose(both, m + each[0] + each[1], **TOLERANCE)


def test_inserting_leaves_the_model_as_it_was(pipelines):
    base = pipelines["demo"].unet
    keys, x = list(base.state_dict()), torch.randn(1, 4, 16, 16)
    text = torch.randn(1, 11, base.config.cross_attention_dim)
    with torch.no_grad():
        before = base(x, 500, text)[0]
        with inject_maps(base, {"up_0": lambda m: m + 1}):
            assert list(base.state_dict()) == keys
            assert not torch.equal(base(x, 500, text)[0], before)
        record_maps(base, x, text, ("down_0",))
        assert torch.equal(base(x, 500, text)[0], before)
    assert not any("forward" in vars(module) for module in base.modules())
