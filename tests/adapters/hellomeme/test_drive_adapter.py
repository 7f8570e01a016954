"""HelloMeme's control networks: constant maps at insertion points, dense and sparse, in sessions; every file loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file

from fisedit import Drive, Editor
from fisedit.adapters.base import AdapterStack
from fisedit.adapters.hellomeme import drive_networks as networks
from fisedit.adapters.hellomeme.drive_adapter import DriveReader
from fisedit.adapters.hellomeme.drive_files import load_control_network
from fisedit.adapters.hellomeme.pose_picture import corners, draw_pose
from fisedit.adapters.insertion_points import inject_maps, insertion_points
from fisedit.errors import AdapterError, InputError, NumericsError
from fisedit.features.cache import FeatureOverlay
from fisedit.models.families.conditioning import Conditioning
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import AdapterUse, parse_adapter_references
from fisedit.values.drive import EXPRESSIONS
from tests.support import oracle
from tests.support.adapters import filled, lively
from tests.support.edits import CAT, DOG, pixels_outside
from tests.support.grids import grids
from tests.support.references import RED, pixels

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/hellomeme"
SQUARE = grids(16, 16)["square"]
QUICK = {"seed": 7, "num_inference_steps": 3, "width": 128, "height": 128}
T = torch.tensor(500)
NOD = Drive((20, 0, 0, 0, 0, 0.4), {"jawOpen": 0.8})
TURN = Drive((0, -30, 10, 0.2, 0.1, 0.3), {"eyeBlinkLeft": 1})


def network(unet, reads=("expression",)):
    """Maps for all down blocks that halve theirs."""
    channels = [block.resnets[-1].out_channels for block in unet.down_blocks if block.downsamplers]
    points = [f"down_{i}" for i in range(len(channels))]
    positions = 64 if reads == ("expression",) else 1024
    return filled(networks.DriveNetwork((16, *channels), 32, positions=positions, reads=reads, points=points))


def upper_network(unet):
    """Maps for all up blocks, as in family v2."""
    places, count = insertion_points(unet), len(unet.up_blocks)
    points = [f"up_{count - 1 - i}" for i in range(count)]
    channels = (16, *(places[point].channels for point in points))
    return filled(networks.DriveNetwork(channels, 32, 4, 1024, ("expression", "emotion"), points))


@pytest.fixture(params=["sd15", "demo"])
def pipe(request, pipelines):
    return pipelines[request.param]


def saved(module, folder, kind):
    folder.mkdir(parents=True)
    save_file(module.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": kind}))
    return folder


@pytest.fixture
def editor(pipe, tmp_path):
    editor = Editor(pipe, model="demo")
    editor.load_adapter(saved(network(pipe.unet), tmp_path / "control", "HMControlNet"), 0.7)
    return editor


def latents(editor, result):
    return torch.cat(editor._trajectory_cache.get(result.id)[0].latents[1:])


def of_diffusers(pipe, prompt, drive, guidance=7.5):
    """Latents after every step [N, 4, h, w], by diffusers' pipeline over a UNet with maps added by their formula."""
    own = network(pipe.unet)
    picture = (
        torch.from_numpy(np.array(draw_pose(drive.pose, (128, 128)), np.float32)).permute(2, 0, 1)[None] / 127.5 - 1
    )
    expression, face = torch.tensor([drive.expression]), torch.zeros(1, 3, 1024)
    with torch.no_grad():
        maps = own(picture, expression, face)
        without = own(-torch.ones_like(picture), torch.zeros_like(expression), face)
    controls = {p: 0.7 * (torch.cat([without[p], maps[p]]) if guidance > 1 else maps[p]) for p in maps}
    plain, path = StableDiffusionPipeline(**pipe.components, requires_safety_checker=False), []
    plain.set_progress_bar_config(disable=True)

    def keep(_, __, ___, given):
        path.append(given["latents"].clone())
        return {}

    with inject_maps(pipe.unet, controls=controls):
        plain(
            prompt,
            num_inference_steps=3,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(7),
            height=128,
            width=128,
            callback_on_step_end=keep,
        )
    return torch.cat(path)


@pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
def test_a_source_is_the_pipelines_with_the_maps(pipe, editor, guidance):
    expected = of_diffusers(pipe, CAT, NOD, guidance)
    result = editor.generate(CAT, drive=NOD, guidance_scale=guidance, **QUICK)
    assert oracle.deviation(latents(editor, result), expected) <= 1e-4
    plain = editor.generate(CAT, guidance_scale=guidance, **QUICK)
    assert oracle.deviation(latents(editor, plain), expected) > 0.01


def test_an_edit_of_everything_is_the_dense_one(pipe, editor):
    editor.generate(CAT, drive=TURN, **QUICK)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), drive=NOD)
    assert oracle.deviation(latents(editor, result), of_diffusers(pipe, DOG, NOD)) <= 1e-4


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("batch", [2, 1], ids=["guided", "unguided"])
@pytest.mark.parametrize("recorded", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("make", [network, upper_network], ids=["down", "up"])
def test_a_sparse_step_is_the_mixed_forward(pipelines, pipe, make, recorded, batch):
    """E4, over a source with a control or without; what it is added to inside is the last skip too."""
    mask = np.zeros((16, 16), bool)
    mask[3:7, 2:6] = mask[10:12, 9:14] = True
    inside, draw = torch.from_numpy(mask), torch.Generator().manual_seed(0)
    source = torch.randn(batch, 4, 16, 16, generator=draw)
    texts = torch.randn(2, batch, 11, pipe.unet.config.cross_attention_dim, generator=draw)
    edited = torch.where(inside, torch.randn(source.shape, generator=draw), source)
    reader, executor = DriveReader(make(pipe.unet)), Executor(pipe.unet)
    reader.check_fit(pipe.unet)
    with pytest.raises(AdapterError, match=r"HelloMeme is for Stable Diffusion 1.x and 2.x, got Stable Diffusion XL"):
        reader.check_fit(pipelines["sdxl"].unet)
    picture = 2 * torch.rand(2, 3, 128, 128, generator=draw) - 1
    maps = reader.network(picture, torch.rand(2, 51, generator=draw), torch.zeros(2, 3, 1024))
    stack = AdapterStack([reader.condition(maps, AdapterUse(0.7), 2)])
    features = executor.run_dense(source, T, Conditioning(texts[0]), {}, extra_layers=stack if recorded else None)[1]
    plan = make_row_plan(mask, executor.num_levels)
    rows = executor.run_sparse(
        edited, T, Conditioning(texts[1]), {}, FeatureOverlay(features, plan), extra_layers=stack
    )[0]
    controls = {point: 0.7 * each[-batch:] for point, each in maps.items()}
    with inject_maps(pipe.unet, controls=controls if recorded else {}):
        recording = oracle.record(pipe.unet, source, T, texts[0])
    if not recorded:
        masks = oracle.levels(inside)
        controls = {
            point: torch.where(masks[oracle.grid_of(each)], each, torch.zeros_like(each))
            for point, each in controls.items()
        }
    with inject_maps(pipe.unet, controls=controls):
        expected = oracle.mixed_forward(pipe.unet, recording, edited, T, texts[1], inside)
    assert oracle.deviation(rows, expected.flatten(2).transpose(1, 2)[:, inside.flatten()]) <= 1e-4


def test_an_edit_follows_its_drive_inside_its_mask_alone(editor):
    source = editor.generate(CAT, **QUICK)
    results = [editor.checkout(source.id) and editor.edit(DOG, mask=SQUARE, drive=each) for each in (None, NOD, TURN)]
    assert all(pixels_outside(result, source) for result in results)
    assert len({pixels(result).tobytes() for result in results}) == 3
    driven = editor.edit(results[-1].prompt, mask=SQUARE, drive=NOD)  # the words may stay
    assert (pixels(driven) != pixels(results[-1])).any() and pixels_outside(driven, results[-1])
    again = editor.edit(CAT, mask=SQUARE)
    assert again.config.like == driven.config.like != ()  # a drive stays until another is given


def test_beside_a_reference_adapter(pipe, editor):
    """Controls are added before the reference is read, and to the skips."""
    from fisedit.adapters.row_column.checkpoints import save_adapter

    folder = Path(editor._engine.references.adapters.popitem()[1].source)
    look = folder.parent / "look"
    save_adapter(lively(pipe.unet, "v1"), look)
    both = Editor(pipe, model="demo")
    both.load_adapter(folder, 0.7)
    both.load_adapter(look)
    source = both.generate(CAT, **QUICK)
    made = [both.checkout(source.id) and both.edit(DOG, mask=SQUARE, reference=RED, drive=d) for d in (NOD, TURN)]
    assert all(pixels_outside(result, source) for result in made) and (pixels(made[0]) != pixels(made[1])).any()
    assert len(made[0].config.like) == 2


def test_sessions_and_metadata_keep_drives(editor, tmp_path):
    editor.generate(CAT, **QUICK)
    made = editor.edit(DOG, mask=SQUARE, drive=NOD)
    editor.save(tmp_path / "session")
    loaded = Editor(editor.pipe, model="demo")
    loaded.load(tmp_path / "session")
    assert loaded.current.config.like == made.config.like and loaded.current.config.like[0].drive == NOD
    assert (pixels(loaded.current) == pixels(made)).all()
    assert '"jawOpen"' not in str(editor.metadata()) and NOD.digest in str(editor.metadata())


def test_emotions_are_for_networks_that_read_them(pipe, tmp_path):
    editor, emotion = Editor(pipe, model="demo"), Drive(emotion=np.linspace(-1, 1, 548))
    editor.load_adapter(saved(network(pipe.unet, ("emotion",)), tmp_path / "emotion", "HMControlNet2"))
    source = editor.generate(CAT, drive=emotion, **QUICK)
    other = editor.edit(CAT, mask=SQUARE, drive=Drive(emotion=[0.5] * 548))
    assert pixels_outside(other, source) and (pixels(other) != pixels(source)).any()
    with pytest.raises(InputError, match="reads PD-FGC's vector, got none; give emotion in Drive"):
        editor.edit(DOG, mask=SQUARE, drive=NOD)
    own = Editor(pipe, model="demo")
    own.load_adapter(saved(network(pipe.unet), tmp_path / "expression", "HMControlNet"))
    with pytest.raises(InputError, match="reads an expression, got an emotion"):
        own.generate(CAT, drive=emotion, **QUICK)


def test_bad_input_is_one_line_each(pipe, editor, tmp_path):
    with pytest.raises(InputError, match="drive must be a Drive, got dict"):
        editor.generate(CAT, drive={"pose": [0] * 6}, **QUICK)
    bare = Editor(pipe, model="demo")
    with pytest.raises(AdapterError, match="a drive needs a control network that reads it; call load_adapter first"):
        bare.generate(CAT, drive=NOD, **QUICK)
    with pytest.raises(InputError, match="guess_mode is for ControlNets"):
        bare.load_adapter(next(iter(editor._engine.references.adapters.values())).source, guess_mode=True)
    odd = Editor(pipe, model="demo")
    odd.load_adapter(saved(upper_network(pipe.unet), tmp_path / "up", "HMV2ControlNet"))
    with pytest.raises(InputError, match="takes pictures up to 512 pixels a side, got 520x128"):
        odd.generate(CAT, drive=NOD, **QUICK | {"width": 520})
    broken = network(pipe.unet)
    broken.conv_in.weight.data[0] = torch.nan
    with pytest.raises(NumericsError, match=r"conv_in\.weight holds NaN"):
        bare.load_adapter(saved(broken, tmp_path / "nan", "HMControlNet"))
    weights = network(pipe.unet).state_dict()
    for name, changed, message in (
        ("less", {k: v for k, v in weights.items() if k != "conv_in.weight"}, "lacks 'conv_in.weight'"),
        ("more", weights | {"other": torch.zeros(1)}, "no family known here: it has other"),
        ("shape", weights | {"face_proj.linear_2.bias": torch.zeros(3)}, "face_proj.linear_2.bias must be"),
        ("scalar", weights | {"conv_in.weight": torch.zeros(())}, "of no family known here"),
        ("side", weights | {"conv_up2_down0.weight": torch.zeros(8, 8, 1, 1)}, "of no family known here"),
    ):
        save_file(changed, tmp_path / f"{name}.safetensors")
        with pytest.raises(AdapterError, match=message):
            load_control_network(tmp_path / f"{name}.safetensors")


def test_networks_that_do_not_fit(pipe, pipelines, tmp_path):
    other = pipelines["sd15" if pipe is pipelines["demo"] else "demo"]
    with pytest.raises(AdapterError, match=r"the control network adds maps of .* channels at .*, got a UNet with"):
        Editor(pipe, model="demo").load_adapter(saved(upper_network(other.unet), tmp_path / "other", "HMV2ControlNet"))


PUBLISHED = json.loads((FIXTURES / "full_size_keys.json").read_text())


def published(kind, folder):
    """A file of a published one's names and shapes, whose weights are small."""
    folder.mkdir(parents=True)
    tensors = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in PUBLISHED[kind].items()}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": kind, "_name_or_path": "there"}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name in PUBLISHED if "Control" in name and "Proj" not in name])
def test_every_published_file_loads(kind, tmp_path):
    folder = published(kind, tmp_path / "control_base")
    if kind.endswith("Base"):
        with pytest.raises(AdapterError, match=r"needs its projection, got none at .*control_proj; put it there"):
            load_control_network(folder)
        projection = "HM5SD15ControlProj" if kind.startswith("HM5") else "HM4SD15ControlProj"
        beside = published(projection, tmp_path / "control_proj")
        with pytest.raises(AdapterError, match="load the network's base"):
            load_control_network(beside)
    reader = load_control_network(folder)
    blocks = {"down_0": 320, "down_1": 640, "down_2": 1280, "down_3": 1280}
    ups = {"up_0": 1280, "up_1": 1280, "up_2": 1280, "up_3": 640}
    expected = {
        "HMControlNet": {name: blocks[name] for name in ("down_0", "down_1", "down_2")},
        "HMControlNet2": {name: blocks[name] for name in ("down_0", "down_1", "down_2")},
        "HMV2ControlNet": ups,
        "HMV2ControlNet2": ups,
    }
    assert dict(reader.channels) == expected.get(kind, blocks | ups)
    assert reader.network.reads_emotions == (kind not in ("HMControlNet", "HMV2ControlNet"))
    (folder / "config.json").unlink()
    assert load_control_network(folder).channels == reader.channels  # by its tensors' names


def test_the_pose_is_drawn_as_published():
    """A head that faces the viewer is an upright square; the published projection's own numbers for a turned one."""
    square = corners((0, 0, 0, 0, 0, 0.4), (512, 512))
    half = 0.2 * 512
    assert np.allclose(square, 256 + half * np.array([[-1, 1], [-1, -1], [1, -1], [1, 1]]))
    moved = corners((0, 0, 0, 0.5, -0.25, 0.4), (512, 512))
    assert np.allclose(moved - square, [128, -64])
    assert np.allclose(
        corners((25, -40, 10, 0.1, 0.2, 0.3), (512, 512)), by_the_published_formula(25, -40, 10, 0.1, 0.2, 0.3)
    )
    picture = np.asarray(draw_pose((0, 0, 0, 0, 0, 0.4), (512, 512)))
    low, high = 256 - round(half), 256 + round(half)
    assert picture[256, low].tolist() == [0, 255, 0] and picture[low, 256].tolist() == [0, 0, 255]
    assert picture[256, high].tolist() == [255, 0, 0] and picture[high, 256].tolist() == [255, 0, 255]
    assert not picture[256, 256].any() and 14 <= (picture[256, :256] > 0).any(-1).sum() <= 16


def by_the_published_formula(pitch, yaw, roll, x, y, scale):
    """The camera looks along -z; the square has a side of 0.1, and the distance makes it `scale` of 512 pixels."""
    from scipy.spatial.transform import Rotation

    focal = 4828.598603909635 * 0.05
    distance = focal * 0.1 / (scale * 512)
    offset = np.array([x * 256 * distance / focal, -y * 256 * distance / focal, -distance])
    square = np.array([[-0.05, -0.05, 0], [-0.05, 0.05, 0], [0.05, 0.05, 0], [0.05, -0.05, 0]])
    points = Rotation.from_euler("xyz", [pitch, yaw, roll], degrees=True).apply(square) + offset
    return np.stack([256 + focal * points[:, 0] / -points[:, 2], 256 - focal * points[:, 1] / -points[:, 2]], 1)


def test_drives_are_values():
    named = Drive(expression={"JawOpen": 0.5, "eyeBlink_L": 1, "tongueOut": 0.3})
    assert len(EXPRESSIONS) == len(set(EXPRESSIONS)) == 51
    assert named.expression[EXPRESSIONS.index("jawOpen")] == 0.5 and sum(named.expression) == 1.5
    again = Drive.from_dict(json.loads(json.dumps(named.as_dict())))
    assert again == named and again.digest == named.digest != Drive().digest
    for arguments, message in (
        ({"pose": (0, 0, 0)}, "pose must be 6 numbers, got 3"),
        ({"pose": (0, 0, 0, 0, 0, 2)}, r"scale must be in \[0.02, 0.65\], got 2"),
        ({"pose": (float("nan"), 0, 0, 0, 0, 0.4)}, "pose must have finite numbers"),
        ({"pose": "ahead"}, "pose must be 6 numbers, got 'ahead'"),
        ({"expression": [1] * 52}, "expression must be 51 numbers, got 52"),
        ({"expression": {"jawOpened": 1}}, "named 'jawOpened'; did you mean jawOpen?"),
        ({"emotion": [1e9] * 548}, "emotion must have numbers in"),
        ({"face": [[0] * 1024] * 3}, "face must be 3072 numbers"),
    ):
        with pytest.raises(InputError, match=message):
            Drive(**arguments)
    for value in ([], {}, {"position": 1}, "nod"):
        with pytest.raises(InputError, match="a drive must be a JSON object"):
            Drive.from_dict(value)
    for value in ("0" * 51, ["0"] * 51, [True] * 51, {"jawOpen": "1"}, 7, None, [[0] * 51]):
        with pytest.raises(InputError, match="a drive's expression must be a list of numbers"):
            Drive.from_dict({"expression": value})
    for value in (10**400, -(10**5000)):
        with pytest.raises(InputError, match="pose must be 6 numbers"):
            Drive.from_dict({"pose": [value] * 6})
    huge = 10**5000
    for value, message in (
        (huge, "must be a JSON object of .*, got a int that is too large to print"),
        ({"pose": huge}, "pose must be a list of numbers, got a int that is too large"),
        ({"expression": {"jawOpen": [huge]}}, "expression must be a list of numbers, got a dict that is too large"),
        ({"expression": {huge: 1}}, "no coefficient of an expression is named a int that is too large to print;"),
    ):
        with pytest.raises(InputError, match=message):
            Drive.from_dict(value)
    with pytest.raises(InputError, match="'eyeBlink_L' of an expression is given twice"):
        Drive(expression={"eyeBlinkLeft": 0, "eyeBlink_L": 1})


def test_a_face_is_kept_in_sixteen_bits():
    face = Drive(face=np.random.default_rng(0).normal(size=3072))
    told = json.dumps(face.as_dict())
    again = Drive.from_dict(json.loads(told))
    assert len(told) < 9_000 and again == face and again.digest == face.digest
    for wrong in ("AAA", "nö", "AAAA"):
        with pytest.raises(InputError, match="a drive's face must be"):
            Drive.from_dict({"face": wrong})


def test_a_session_that_lies_about_a_drive_is_refused():
    entry = {"adapter": "0" * 16, "scale": 1.0, "reference": NOD.digest, "drive": NOD.as_dict()}
    assert parse_adapter_references([entry])[0].drive == NOD
    with pytest.raises(InputError, match="a drive's digest must be"):
        parse_adapter_references([entry | {"reference": TURN.digest}])


def test_a_picture_is_no_drive(editor):
    """Nor the other way round, whatever a session's entries say."""
    editor.generate(CAT, drive=NOD, **QUICK)
    references, (entry,) = editor._engine.references, editor.current.config.like
    references.pictures["0" * 16] = RED
    config = replace(editor.current.config, like=(replace(entry, reference="0" * 16, drive=None),))
    with pytest.raises(AdapterError, match=r"the drive picture 0+ is not here; give it again"):
        references.prepare(config, 2)


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_changes_of_an_expression_count_in_sixteen_bits(pipe, dtype):
    """Coefficients times 500 are phases: they are computed in 32 bit."""
    whole = network(pipe.unet)
    numbers, face = torch.full((1, 51), 0.601), torch.zeros(1, 3, 1024)
    expected = whole.tokens(numbers, face, None)
    found = network(pipe.unet).to(dtype).tokens(numbers, face, None)
    assert (found.float() - expected).norm() / expected.norm() < 0.02
