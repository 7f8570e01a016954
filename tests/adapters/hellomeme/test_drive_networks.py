"""HelloMeme's control networks compute what the public ones do, by the names and shapes of every published file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fisedit.adapters.hellomeme import drive_networks as drive
from tests.support.adapters import filled

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/hellomeme"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

pytestmark = pytest.mark.usefixtures("no_grad")


def fixture(name):
    return load_file(FIXTURES / f"{name}.safetensors")


def names(file, start="m:"):
    keys = json.loads((FIXTURES / f"{file}.keys.json").read_text())
    return {key.removeprefix(start): shape for key, shape in keys.items() if key.startswith(start)}


def shapes(module):
    return {name: list(tensor.shape) for name, tensor in module.state_dict().items()}


def frames(x, dim=2):
    """[1, C, F, h, w] -> [F, C, h, w]."""
    return x.movedim(dim, 1).flatten(0, 1)


SMALL = {"channels": (16, 32, 64, 96), "width": 32}


def test_an_expression_is_the_public_networks():
    network, given = filled(drive.DriveNetwork(**SMALL)), fixture("ctrl_v1")
    assert shapes(network) == names("ctrl_v1")
    found = network(frames(given["in.condition"]), given["in.drive_coeff"][0], given["in.face_parts"][0])
    for point in ("down_0", "down_1", "down_2"):
        assert torch.allclose(found[point], frames(given[f"out.{point}"]), **TOLERANCE), point


def test_an_emotion_is_the_public_networks():
    network, given = filled(drive.DriveNetwork(**SMALL, positions=1024, reads=("emotion",))), fixture("ctrl2_v1")
    assert shapes(network) == names("ctrl2_v1")
    found = network(frames(given["in.condition"]), emotion=given["in.emo"][0])
    for i in range(3):
        assert torch.allclose(found[f"down_{i}"], frames(given[f"out.down2_{i}"]), **TOLERANCE), i


def test_lines_attend_to_tokens_as_the_public_ones():
    block, given = filled(drive.LinesToTokens(32, 24, table=True)), fixture("stk_cross")
    assert shapes(block) == names("stk_cross")
    found = block(given["in.x"][0], given["in.e"][0])
    assert torch.allclose(found, given["out.y"][0], **TOLERANCE)


def test_a_small_unet_is_the_public_one():
    network, given = filled(drive.SmallUNet((32, 64, 96), 32, 24, table=True)), fixture("small_unet_v4")
    assert shapes(network) == names("small_unet_v4")
    found = network(frames(given["in.x"]), given["in.e"][0])
    for i, each in enumerate(found):
        assert torch.allclose(each, frames(given[f"out.feat_{i}"]), **TOLERANCE), i


def test_a_projector_is_the_public_one():
    block, given = filled(drive.MapProjector(32, 64)), fixture("hm_projector_v5")
    assert shapes(block) == names("hm_projector_v5")
    assert torch.allclose(block(frames(given["in.x"])), frames(given["out.y"]), **TOLERANCE)


UPS = ("up_3", "up_2", "up_1", "up_0")
V2 = {"channels": (128, 640, 1280, 1280, 1280), "scale": 4, "positions": 1024, "points": UPS}
PUBLISHED = {
    "HMControlNet": drive.DriveNetwork,
    "HMControlNet2": lambda: drive.DriveNetwork(positions=1024, reads=("emotion",)),
    "HMV2ControlNet": lambda: drive.DriveNetwork(**V2),
    "HMV2ControlNet2": lambda: drive.DriveNetwork(**V2, reads=("emotion",)),
    "HMV3ControlNet": lambda: drive.DriveNetwork(**V2, reads=("expression", "emotion"), side_convs=(320, 640)),
    "HMControlNetBase": lambda: drive.DriveBase(table=True),
    "HM5ControlNetBase": lambda: drive.DriveBase(table=False),
    "HM4SD15ControlProj": lambda: drive.DriveProjection(attends=False),
    "HM5SD15ControlProj": lambda: drive.DriveProjection(attends=True),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_names_and_shapes_are_those_of_the_published_files(kind):
    published = json.loads((FIXTURES / "full_size_keys.json").read_text())[kind]
    with torch.device("meta"):
        assert shapes(PUBLISHED[kind]()) == published
