"""T2I-Adapters: whole pictures are diffusers' own pipeline's, sparse steps the mixed dense forward's."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionAdapterPipeline, StableDiffusionXLAdapterPipeline, T2IAdapter

from fisedit import Editor
from fisedit.adapters.base import AdapterStack
from fisedit.adapters.t2i_adapter import T2IAdapterReader
from fisedit.errors import AdapterError, InputError
from fisedit.features.cache import FeatureOverlay
from fisedit.models.families.conditioning import Conditioning
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import AdapterUse
from tests.support import oracle
from tests.support.adapters import filled
from tests.support.edits import CAT, DOG, pixels_outside
from tests.support.grids import grids
from tests.support.pipelines import assembled
from tests.support.references import BLUE, RED, pixels
from tests.support.steps import StepEdit
from tests.support.steps import rows as rows_of_grid

SQUARE = grids(16, 16)["square"]
QUICK = {"seed": 7, "num_inference_steps": 3}
T = torch.tensor(500)


def network(pipe, in_channels=3):
    channels = list(pipe.unet.config.block_out_channels)
    return filled(T2IAdapter(in_channels=in_channels, channels=channels, num_res_blocks=1, downscale_factor=8))


@pytest.fixture(params=["sd15", "demo"])
def pipe(request, pipelines):
    return pipelines[request.param]


@pytest.fixture
def editor(pipe, tmp_path):
    network(pipe).save_pretrained(tmp_path / "t2i")
    editor = Editor(pipe, model="demo")
    editor.load_adapter(tmp_path / "t2i", 0.7)
    return editor


def of_diffusers(pipe, prompt, picture, guidance=7.5):
    """Latents after every step [N, 4, h, w]."""
    parts = {name: part for name, part in pipe.components.items() if name != "image_encoder"}
    own = StableDiffusionAdapterPipeline(**parts, adapter=network(pipe), requires_safety_checker=False)
    own.set_progress_bar_config(disable=True)
    path = []
    own(
        prompt,
        image=picture,
        num_inference_steps=3,
        guidance_scale=guidance,
        adapter_conditioning_scale=0.7,
        generator=torch.Generator().manual_seed(7),
        height=128,
        width=128,
        callback=lambda _, __, latents: path.append(latents.clone()),
        callback_steps=1,
    )
    return torch.cat(path)


def latents(editor, result):
    return torch.cat(editor._trajectory_cache.get(result.id)[0].latents[1:])


@pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
def test_a_source_is_the_pipelines_own(pipe, editor, guidance):
    expected = of_diffusers(pipe, CAT, RED, guidance)
    result = editor.generate(CAT, control=RED, guidance_scale=guidance, width=128, height=128, **QUICK)
    assert oracle.deviation(latents(editor, result), expected) <= 1e-4
    plain = editor.generate(CAT, guidance_scale=guidance, width=128, height=128, **QUICK)
    assert oracle.deviation(latents(editor, plain), expected) > 0.1


def test_an_edit_of_everything_is_the_dense_one(pipe, editor):
    editor.generate(CAT, control=BLUE, width=128, height=128, **QUICK)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), control=RED)
    assert oracle.deviation(latents(editor, result), of_diffusers(pipe, DOG, RED)) <= 1e-4


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("batch", [2, 1], ids=["guided", "unguided"])
@pytest.mark.parametrize("recorded", [True, False], ids=["with", "without"])
def test_a_sparse_step_is_the_mixed_forward(pipe, batch, recorded):
    """E4, over a source with the adapter or without."""
    mask = np.zeros((16, 16), bool)
    mask[3:7, 2:6] = mask[10:12, 9:14] = True
    inside, make = torch.from_numpy(mask), torch.Generator().manual_seed(0)
    source = torch.randn(batch, 4, 16, 16, generator=make)
    texts = torch.randn(2, batch, 11, pipe.unet.config.cross_attention_dim, generator=make)
    edited = torch.where(inside, torch.randn(source.shape, generator=make), source)
    reader, executor = T2IAdapterReader(network(pipe)), Executor(pipe.unet)
    maps = reader.network(torch.rand(1, 3, 128, 128, generator=make))
    stack = AdapterStack([reader.condition(maps, AdapterUse(0.7), 2)])
    features = executor.run_dense(source, T, Conditioning(texts[0]), {}, extra_layers=stack if recorded else None)[1]
    plan = make_row_plan(mask, executor.num_levels)
    rows = executor.run_sparse(
        edited, T, Conditioning(texts[1]), {}, FeatureOverlay(features, plan), extra_layers=stack
    )[0]
    expected = mixed(pipe.unet, source, edited, texts, inside, [0.7 * each for each in maps], recorded=recorded)
    assert oracle.deviation(rows, expected.flatten(2).transpose(1, 2)[:, inside.flatten()]) <= 1e-4


def mixed(unet, source, edited, texts, inside, maps, *, recorded):
    """The oracle's prediction; where the source had no adapter, its maps are added inside alone."""
    added = [each.clone() for each in maps]
    own = maps if recorded else None
    with adding(unet, own):
        recording = oracle.record(unet, source, T, texts[0])
    if not recorded:
        masks = oracle.levels(inside)
        added = [torch.where(masks[oracle.grid_of(each)], each, torch.zeros_like(each)) for each in maps]
    with adding(unet, added):
        return oracle.mixed_forward(unet, recording, edited, T, texts[1], inside)


class adding:  # noqa: N801 (a context)
    def __init__(self, unet, maps):
        self.unet, self.maps = unet, maps

    def __enter__(self):
        if self.maps is not None:
            maps, forward = self.maps, type(self.unet).forward
            self.unet.forward = lambda *args, **kwargs: partial(forward, self.unet)(
                *args, down_intrablock_additional_residuals=[each.clone() for each in maps], **kwargs
            )

    def __exit__(self, *_):
        self.unet.__dict__.pop("forward", None)


def test_an_edit_follows_its_control_inside_its_mask_alone(editor):
    source = editor.generate(CAT, width=128, height=128, **QUICK)
    results = [editor.checkout(source.id) and editor.edit(DOG, mask=SQUARE, control=p) for p in (None, RED, BLUE)]
    assert all(pixels_outside(result, source) for result in results)
    assert len({pixels(result).tobytes() for result in results}) == 3
    kept = editor.generate(CAT, control=RED, width=128, height=128, **QUICK)
    assert editor.edit(DOG, mask=SQUARE).config.like == kept.config.like != ()


def xl_network(pipe, in_channels=3):
    """One of Stable Diffusion XL's kind, whose first map is half as wide, and whose last is the middle's."""
    channels = list(pipe.unet.config.block_out_channels)
    options = {"in_channels": in_channels, "channels": [*channels, channels[-1]], "num_res_blocks": 2}
    return filled(T2IAdapter(**options, downscale_factor=16, adapter_type="full_adapter_xl"))


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_one_of_stable_diffusion_xl_is_its_pipelines(pipelines, tmp_path, kind):
    """A source, an edit of everything, and what an edit leaves outside."""
    pipe = pipelines["sdxl"]
    xl_network(pipe).save_pretrained(tmp_path / "t2i")
    if kind == "file":
        (tmp_path / "t2i" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "one.safetensors")
    editor = Editor(pipe)
    editor.load_adapter(tmp_path / ("one.safetensors" if kind == "file" else "t2i"), 0.7)

    def expected(prompt, picture):
        own = assembled(pipe, StableDiffusionXLAdapterPipeline, adapter=xl_network(pipe))
        path = []
        own(
            prompt,
            image=picture,
            num_inference_steps=3,
            guidance_scale=7.5,
            adapter_conditioning_scale=0.7,
            generator=torch.Generator().manual_seed(7),
            height=128,
            width=128,
            callback_on_step_end=lambda _, __, ___, state: path.append(state["latents"]) or state,
        )
        return torch.cat(path)

    source = editor.generate(CAT, control=RED, guidance_scale=7.5, **QUICK)
    assert oracle.deviation(latents(editor, source), expected(CAT, RED)) <= 1e-4
    sparse = editor.edit(DOG, mask=SQUARE, growth=1)
    assert pixels_outside(sparse, source) and sparse.stats.unet_evaluations_sparse
    editor.checkout(source.id)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), control=BLUE)
    assert oracle.deviation(latents(editor, result), expected(DOG, BLUE)) <= 1e-4
    with pytest.raises(InputError, match="takes sides divisible by 16, got 104x128"):
        editor.generate(CAT, control=RED, width=104, height=128, **QUICK)


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("recorded", [True, False], ids=["with", "without"])
def test_a_sparse_step_of_stable_diffusion_xl_is_the_mixed_forward(pipelines, recorded):
    """E4, over a source with the adapter or without."""
    unet, grid = pipelines["sdxl"].unet, grids(16, 16)["blobs"]
    case, executor, reader = StepEdit(unet, grid), Executor(unet), T2IAdapterReader(xl_network(pipelines["sdxl"]))
    maps = reader.network(torch.rand(1, 3, 128, 128))
    stack = AdapterStack([reader.condition(maps, AdapterUse(0.7), 2)])
    features = executor.run_dense(case.source, T, case.texts[0], {}, extra_layers=stack if recorded else None)[1]
    overlay = FeatureOverlay(features, make_row_plan(grid, executor.num_levels))
    got = executor.run_sparse(case.edited, T, case.texts[1], {}, overlay, extra_layers=stack)[0]
    texts, scaled = [text.unet_inputs for text in case.texts], [0.7 * each.expand(2, -1, -1, -1) for each in maps]
    expected = mixed(unet, case.source, case.edited, texts, case.inside, scaled, recorded=recorded)
    assert oracle.deviation(got, rows_of_grid(expected, grid)) <= 1e-4


def test_grey_networks_and_those_that_do_not_fit(pipe, pipelines, tmp_path):
    editor = Editor(pipe, model="demo")
    network(pipe, 1).save_pretrained(tmp_path / "grey")
    editor.load_adapter(tmp_path / "grey")
    editor.generate(CAT, control=RED, width=128, height=128, **QUICK)
    with pytest.raises(AdapterError, match="a reference needs an adapter"):
        editor.generate(CAT, reference=RED, **QUICK)
    other = pipelines["sd15" if pipe is pipelines["demo"] else "demo"]
    network(other).save_pretrained(tmp_path / "other")
    with pytest.raises(AdapterError, match="must have channels"):
        editor.load_adapter(tmp_path / "other")
