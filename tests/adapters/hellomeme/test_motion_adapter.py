"""Motion modules: what the public ones compute, in sparse evaluations of a clip, and every published file loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AnimateDiffPipeline, UNetMotionModel
from safetensors.torch import load_file, save_file
from torch import nn

from fisedit import Editor, Region
from fisedit.adapters.base import AdapterStack, items_of, map_changes
from fisedit.adapters.hellomeme.motion_adapter import MotionReader, points_of
from fisedit.adapters.hellomeme.motion_files import load_motion_adapter
from fisedit.adapters.hellomeme.motion_modules import ClipInputs, MotionBlock, PaddedTransformer
from fisedit.adapters.insertion_points import inject_maps, record_maps
from fisedit.adapters.loading import load_picture_adapter
from fisedit.errors import AdapterError, NumericsError
from fisedit.features.cache import FeatureOverlay, RepeatedFeatures
from fisedit.models.families.conditioning import Conditioning
from fisedit.sampling import denoise
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import AdapterUse
from tests.support import oracle
from tests.support.adapters import filled
from tests.support.edits import CAT, DOG
from tests.support.grids import grids
from tests.support.motion import reader_of

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/hellomeme"
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
T = torch.tensor(500)
FRAMES = 3


@pytest.fixture(params=["sd15", "demo"])
def pipe(request, pipelines):
    return pipelines[request.param]


def test_a_block_is_the_public_one():
    block, given = filled(MotionBlock(32, 128, 8)), load_file(FIXTURES / "sk_motion_v3.safetensors")
    pad = given["in.pad"].transpose(1, 2)[:, [0, -1]]
    found = given["in.hidden"] + block(given["in.hidden"], ClipInputs(3, given["in.temb"], pad))
    assert torch.allclose(found, given["out.y"], **TOLERANCE)


PUBLISHED = ("HM3MotionAdapter", "HM5MotionAdapter", "MotionAdapter(v1-5-3)")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("kind", PUBLISHED)
def test_every_published_file_loads(kind, named, tmp_path):
    """By its class, or by its tensors alone: names and shapes are those of the published files."""
    published = json.loads((FIXTURES / "full_size_keys.json").read_text())[kind]
    tensors = {name: torch.zeros(1, dtype=torch.float16).expand(shape) for name, shape in published.items()}
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, tmp_path / "diffusion_pytorch_model.safetensors"
    )
    if named:
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": kind.partition("(")[0]}))
    reader = load_picture_adapter(tmp_path, nn.Module())
    assert isinstance(reader, MotionReader) and reader.reads_pictures is (kind != "MotionAdapter(v1-5-3)")
    expected = {"HM3MotionAdapter": 8, "HM5MotionAdapter": 8}.get(kind, 20)
    assert len(reader.modules) == expected
    assert {module.channels for module in reader.modules.values()} == {320, 640, 1280}


def clip_of(unet, mask, seed=0, branches=2):
    """Latents of a source [S, 4, h, w] and of its frames [S * F, 4, h, w], the source's outside the mask; a text."""
    draw = torch.Generator().manual_seed(seed)
    source = torch.randn(branches, 4, 16, 16, generator=draw)
    text = torch.randn(branches, 11, unet.config.cross_attention_dim, generator=draw)
    fresh = torch.randn(branches * FRAMES, 4, 16, 16, generator=draw)
    return source, torch.where(torch.from_numpy(mask), fresh, source.repeat_interleave(FRAMES, 0)), text


def pads_of(unet, reader, branches, seed=3):
    """Maps of two pictures, as `condition` takes them."""
    draw = torch.Generator().manual_seed(seed)
    text = torch.randn(branches, 11, unet.config.cross_attention_dim, generator=draw)
    latents = [torch.randn(branches, 4, 16, 16, generator=draw) for _ in range(2)]
    return [record_maps(unet, each, text, tuple(reader.modules)) for each in latents]


def sparse_frames(unet, stack, source, frames, text, mask):
    """Active rows [S * F, R, 4] of one step."""
    executor = Executor(unet)
    features = executor.run_dense(source, T, Conditioning(text), {})[1]
    plan = make_row_plan(mask, executor.num_levels)
    overlay = FeatureOverlay(RepeatedFeatures(features, FRAMES), plan)
    return executor.run_sparse(
        frames, T, Conditioning(text.repeat_interleave(FRAMES, 0)), {}, overlay, extra_layers=stack
    )[0]


def inside_alone(module, masks):
    """The module's gain on whole maps, at active cells alone; of v5's first attention nothing elsewhere."""

    def gain(x, inputs):
        mask = masks[oracle.grid_of(x)]
        if not (isinstance(module, PaddedTransformer) and inputs.pad is not None):
            return torch.where(mask, module(x, inputs), torch.zeros_like(x))
        clip = x.unflatten(0, (-1, FRAMES))
        padded = torch.cat([inputs.pad[:, :1], clip, inputs.pad[:, 1:]], 1).flatten(0, 1)
        first = module.attn_pad(padded, num_frames=FRAMES + 2) - padded
        first = first.unflatten(0, (-1, FRAMES + 2))[:, 1:-1].flatten(0, 1)
        found = 2 * x + torch.where(mask, first, torch.zeros_like(x))
        return torch.where(mask, module.attn1(found, num_frames=FRAMES) - x, torch.zeros_like(x))

    return gain


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("branches", [2, 1], ids=["guided", "unguided"])
@pytest.mark.parametrize("family", ["v3", "v5", "v5 alone", "animatediff"])
def test_a_sparse_step_is_the_mixed_forward_of_all_frames(pipelines, pipe, family, branches):
    """E4: at active cells the modules see the whole mixed maps of all frames; elsewhere the source stands still."""
    unet, mask = pipe.unet, grids(16, 16)["square"].copy()
    mask[11:13, 1:4] = True
    reader = reader_of(unet, family.removesuffix(" alone"))[0]
    reader.check_fit(unet)
    with pytest.raises(AdapterError, match=r"a motion adapter is for Stable Diffusion 1.x and 2.x"):
        reader.check_fit(pipelines["sdxl"].unet)
    pads = pads_of(unet, reader, branches) if family in ("v3", "v5") else None
    condition = reader.condition(pads, AdapterUse(0.8), branches)
    source, frames, text = clip_of(unet, mask, branches=branches)
    rows = sparse_frames(unet, AdapterStack([condition]), source, frames, text, mask)
    repeated, times = text.repeat_interleave(FRAMES, 0), list[torch.Tensor]()
    masks = oracle.levels(torch.from_numpy(mask))
    gains = {point: inside_alone(module, masks) for point, module in reader.modules.items()}

    def change(point):
        def changed(x):
            inputs = ClipInputs(FRAMES, times[-1], condition.pads.get(point))
            return x + 0.8 * gains[point](x, inputs)

        return changed

    recording = oracle.record(unet, source.repeat_interleave(FRAMES, 0), T, repeated)
    with inject_maps(unet, {point: change(point) for point in reader.modules}, time_hook=times.append):
        expected = oracle.mixed_forward(unet, recording, frames, T, repeated, torch.from_numpy(mask))
    assert oracle.deviation(rows, expected.flatten(2).transpose(1, 2)[:, mask.flatten()]) <= 1e-4
    still = sparse_frames(unet, None, source, frames, text, mask)
    assert oracle.deviation(rows, still) > 0.01  # the modules do something
    alone = sparse_frames(unet, AdapterStack([condition]), source, frames.roll(1, 0), text, mask)
    assert oracle.deviation(rows.roll(1, 0), alone) > 1e-3  # and their order counts


@pytest.mark.usefixtures("no_grad")
def test_a_clip_of_everything_is_diffusers_own(pipe):
    """AnimateDiff's modules over the whole picture are `UNetMotionModel`."""
    unet, mask = pipe.unet, grids(16, 16)["square"] | True
    reader, adapter = reader_of(unet, "animatediff")
    source, frames, text = clip_of(unet, mask)
    stack = AdapterStack([reader.condition(None, AdapterUse(), 2)])
    rows = sparse_frames(unet, stack, source, frames, text, mask)
    motion = UNetMotionModel.from_unet2d(unet, adapter).eval()
    clip = frames.unflatten(0, (2, FRAMES)).transpose(1, 2)
    expected = motion(clip, T, text.repeat_interleave(FRAMES, 0), return_dict=False)[0].transpose(1, 2).flatten(0, 1)
    assert oracle.deviation(rows, expected.flatten(2).transpose(1, 2)) <= 1e-4


def test_a_clip_of_everything_is_the_pipelines(pipe, tmp_path):
    """`AnimateDiffPipeline` from the same noise in all frames, over all steps."""
    editor, adapter = Editor(pipe, model="demo"), reader_of(pipe.unet, "animatediff")[1]
    adapter.save_pretrained(tmp_path)
    editor.load_adapter(tmp_path)
    source = editor.generate(CAT, seed=7, num_inference_steps=3, width=128, height=128)
    everywhere, pipeline = Region.mask(np.ones((16, 16), bool)), editor._pipeline
    requests = [pipeline.requests.edit(DOG, everywhere) for _ in range(FRAMES)]
    plan = pipeline.plan(replace(requests[0], is_frame=True))
    assert plan.mode.dilation and not plan.fallback
    edits = [pipeline.renderer.latent_edit(each, plan) for each in requests]
    trajectory = editor._trajectory_cache.get(source.id)[0]
    found = torch.cat(denoise.run_clip(editor._engine, trajectory, edits, lambda *_: None))
    parts = {name: part for name, part in pipe.components.items() if name != "safety_checker"}
    animated = AnimateDiffPipeline(**parts, motion_adapter=adapter)
    animated.set_progress_bar_config(disable=True)
    expected = animated(
        DOG,
        num_frames=FRAMES,
        num_inference_steps=3,
        guidance_scale=7.5,
        latents=trajectory.latents[0][:, :, None].expand(-1, -1, FRAMES, -1, -1),
        output_type="latent",
    ).frames
    assert oracle.deviation(found, expected[0].transpose(0, 1)) <= 1e-4
    assert oracle.deviation(found[:1], found[1:2]) > 1e-3


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("family", ["v3", "v5"])
def test_modules_read_maps_as_references_and_controls_left_them(pipe, family):
    """HelloMeme's order: control, reference, motion."""
    unet = pipe.unet
    reader = reader_of(unet, family)[0]
    condition = reader.condition(pads_of(unet, reader, 2), AdapterUse(), 2)
    pad = condition.pads["up_1"]
    x = torch.randn(2 * FRAMES, *pad.shape[2:])
    condition.see_time(torch.randn(2 * FRAMES, unet.time_embedding.linear_2.out_features))

    class Other:
        reads_changed = inside_blocks = False

        def gains(self, batch):
            return {"up_1": torch.sin}

    orders = [Other(), condition], [condition, Other()]
    changes = [map_changes(adapters, len(x))["up_1"] for adapters in orders]
    left = x + torch.sin(x)
    expected = left + condition.gains(len(x))["up_1"](left)
    assert all(torch.equal(change(x), expected) for change in changes)


def test_what_is_read_for_branches_serves_frames():
    read = torch.arange(2.0)[:, None]
    assert items_of(read, 6)[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert items_of(read, 1).tolist() == [[1]] and items_of(read, 2).tolist() == [[0], [1]]


def test_places_behind_layers_are_those_of_diffusers(pipe):
    """By channels, levels and readers: what is recorded there begins with the map."""
    unet, seen = pipe.unet, dict[str, torch.Tensor]()
    points = {name: point for name, point in points_of(unet).items() if "." in name}

    def keep(name):
        def change(x):
            seen[name] = x.clone()
            return x

        return change

    source, _, text = clip_of(unet, grids(16, 16)["square"])
    with torch.no_grad(), inject_maps(unet, {name: keep(name) for name in points}):
        features = Executor(unet).run_dense(source, T, Conditioning(text), {})[1]
    assert seen.keys() == points.keys()
    for name, point in points.items():
        recorded = features.whole(point.reader, point.level)[..., : point.channels]
        assert torch.equal(recorded, seen[name].flatten(2).transpose(1, 2)), name


def _saved(module, folder, kind=None):
    folder.mkdir()
    save_file(module.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    if kind:
        (folder / "config.json").write_text(json.dumps({"_class_name": kind}))
    return folder


def test_files_that_are_refused(tmp_path, pipelines):
    unet = pipelines["sd15"].unet
    block = filled(MotionBlock(32, 128, 8))
    parts = nn.ModuleDict({"motion_down": nn.ModuleList([block])})
    state = parts.state_dict()

    def load(tensors):
        save_file(tensors, tmp_path / "motion.safetensors")
        return load_motion_adapter(tmp_path / "motion.safetensors")

    name = "motion_down.0.norm.weight"
    with pytest.raises(AdapterError, match=r"^the motion adapter lacks motion_down\.0\.norm\.weight"):
        load({key: each for key, each in state.items() if key != name})
    with pytest.raises(
        AdapterError, match=r"^the motion adapter's motion_down\.0\.norm\.weight must be \(32,\), got \(33,\)"
    ):
        load(state | {name: torch.zeros(33)})
    with pytest.raises(AdapterError, match=r"^the motion adapter is of no family known here: it has other"):
        load(state | {"other": torch.zeros(1)})
    with pytest.raises(AdapterError, match="of no family known here"):
        load({key: each for key, each in state.items() if "time_emb" not in key})
    with pytest.raises(NumericsError, match="holds NaN or infinity"):
        load(state | {name: torch.full((32,), torch.nan)})
    reader = load(state)
    assert reader.modules["down_0"].channels == 32
    wide = MotionReader({"down_0": MotionBlock(48, 128, 4)})
    with pytest.raises(
        AdapterError, match=r"^the motion modules need 48 channels at down_0, got a UNet with \d+ channels"
    ):
        wide.check_fit(unet)
