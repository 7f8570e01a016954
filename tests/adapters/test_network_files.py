"""ControlNets and T2I-Adapters as one file: the weights of diffusers' folder, or refused by what they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from diffusers import ControlNetModel, T2IAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from fisedit.adapters.loading import load_picture_adapter
from fisedit.errors import AdapterError, NumericsError
from tests.support.adapters import filled
from tests.support.single_file import unet_name

HINTS = {"conv_in": 0, **{f"blocks.{i}": 2 * i + 2 for i in range(6)}, "conv_out": 14}
FILE = "diffusion_pytorch_model.safetensors"


def control_net_of_2023(pipe, tensors: Mapping[str, Tensor], start: str = "control_model.") -> dict[str, Tensor]:
    """A ControlNet's tensors under the names of its first release."""

    def name(old: str) -> str:
        part, _, rest = old.partition(".")
        if part == "controlnet_cond_embedding":
            place, _, kind = rest.rpartition(".")
            return f"input_hint_block.{HINTS[place]}.{kind}"
        if part == "controlnet_down_blocks":
            return re.sub(r"(\d+)\.", r"zero_convs.\1.0.", rest)
        return f"middle_block_out.0.{rest}" if part == "controlnet_mid_block" else unet_name(pipe, old)

    return {start + name(old): tensor for old, tensor in tensors.items()}


def t2i_of_2023(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A T2I-Adapter's tensors under the names of its first release: two layers a block, or the light kind's bodies."""
    light = any("out_conv" in name for name in tensors)

    def name(old: str) -> str:
        new = old.removeprefix("adapter.")
        if light:
            return new.replace(".resnets.", ".body.")
        new = re.sub(r"body\.(\d)\.in_conv", lambda m: f"body.{2 * int(m[1])}.in_conv", new)
        return re.sub(r"body\.(\d)\.resnets\.(\d)", lambda m: f"body.{2 * int(m[1]) + int(m[2])}", new)

    return {name(old): tensor for old, tensor in tensors.items()}


@pytest.fixture(scope="module")
def pipe(pipelines):
    return pipelines["sd15"]


@pytest.fixture
def folder(request, pipe, tmp_path):
    """A network of diffusers', saved by it."""
    channels = list(pipe.unet.config.block_out_channels)
    network = {
        "control": partial(ControlNetModel.from_unet, pipe.unet, conditioning_embedding_out_channels=(8, 16, 16, 16)),
        "full": partial(T2IAdapter, 3, channels, 2, 8, "full_adapter"),
        "grey": partial(T2IAdapter, 1, channels, 2, 8, "full_adapter"),
        "light": partial(T2IAdapter, 3, [*channels[:2], channels[3]], 4, 8, "light_adapter"),
    }[request.param]()
    filled(network).save_pretrained(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.mark.parametrize(
    ("folder", "layout"),
    [
        ("control", "diffusers"),
        ("control", "2023"),
        ("control", "2023, alone"),
        ("control", "with its model"),
        *((kind, layout) for kind in ("full", "grey", "light") for layout in ("diffusers", "2023")),
    ],
    indirect=["folder"],
)
def test_one_file_is_the_folder(pipe, folder, layout, tmp_path):
    tensors = load_file(folder / FILE)
    if layout == "2023" and any(name.startswith("adapter.") for name in tensors):
        tensors = t2i_of_2023(tensors)
    elif layout != "diffusers":
        tensors = control_net_of_2023(pipe, tensors, "" if layout == "2023, alone" else "control_model.")
    beside = {"first_stage_model.a": torch.ones(1)} if layout == "with its model" else {}
    save_file(tensors | beside, tmp_path / "one.SafeTensors")
    one, whole = (load_picture_adapter(place, pipe.unet) for place in (tmp_path / "one.SafeTensors", folder))
    assert one.identity == whole.identity and type(one) is type(whole)


@pytest.mark.parametrize("folder", ["control"], indirect=True)
def test_a_folder_in_parts_or_of_a_variant_alone(pipe, folder):
    identity = load_picture_adapter(folder, pipe.unet).identity
    model = ControlNetModel.from_pretrained(folder)
    (folder / FILE).unlink()
    model.save_pretrained(folder, variant="non_ema", max_shard_size="200KB")
    assert load_picture_adapter(folder, pipe.unet).identity == identity


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("lora_controlnet", "as a LoRA"),
        ("lllite_unet_a.down.0.weight", "ControlNet-LLLite"),
        ("difference", "as differences from a model"),
        ("add_embedding.linear_1.weight", "for Stable Diffusion XL"),
        ("control_add_embedding.linear_1.bias", "Union"),
        ("something", "holds something, which no ControlNet for this model has"),
    ],
)
@pytest.mark.parametrize("folder", ["control"], indirect=True)
def test_other_kinds_are_refused_by_what_they_are(pipe, folder, name, line):
    save_file(load_file(folder / FILE) | {name: torch.ones(1)}, folder / "one.safetensors")
    with pytest.raises(AdapterError, match=line):
        load_picture_adapter(folder / "one.safetensors", pipe.unet)


@pytest.mark.parametrize("folder", ["control"], indirect=True)
def test_one_for_another_model_one_that_pools_and_one_that_is_no_number(pipe, pipelines, folder):
    (folder / "one.safetensors").symlink_to(folder / FILE)
    with pytest.raises(AdapterError, match=r"must be .*, got .*; load one for this model"):
        load_picture_adapter(folder / "one.safetensors", pipelines["sd2"].unet)
    described = (folder / "config.json").read_text()
    (folder / "config.json").write_text(described.replace('"rgb"', '"bgr"'))
    assert load_picture_adapter(folder / FILE, pipe.unet).model.config.controlnet_conditioning_channel_order == "bgr"
    (folder / "control_shuffle.safetensors").symlink_to(folder / FILE)
    with pytest.raises(AdapterError, match="a ControlNet that pools its maps"):
        load_picture_adapter(folder / "control_shuffle.safetensors", pipe.unet).check_fit(pipe.unet)
    save_file(load_file(folder / FILE) | {"conv_in.bias": torch.full((16,), torch.nan)}, folder / "nan.safetensors")
    with pytest.raises(NumericsError, match=r"the ControlNet's conv_in.bias holds NaN or infinity; get the file again"):
        load_picture_adapter(folder / "nan.safetensors", pipe.unet)
