"""IP-Adapters: whole pictures are diffusers' own pipeline's, sparse steps the mixed dense forward's."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModelWithProjection

from fisedit import Editor
from fisedit.adapters.base import AdapterStack
from fisedit.adapters.ip_adapter import IPAdapterCondition, build_ip_adapter, cross_attention_names
from fisedit.costs.macs import unet_macs
from fisedit.errors import AdapterError, NumericsError
from fisedit.features.cache import FeatureOverlay
from fisedit.features.sites import Role, unet_sites
from fisedit.models.families.conditioning import Conditioning
from fisedit.sparse.executor import Executor
from fisedit.sparse_kernels.row_plan import make_row_plan
from fisedit.values import AdapterUse
from tests.support import ip_adapters, oracle
from tests.support.adapters import SD15_GRIDS, SD15_SIZES
from tests.support.edits import CAT, DOG, Calls, pixels_outside
from tests.support.grids import grids
from tests.support.macs import counted
from tests.support.pipelines import assembled, build_pipeline
from tests.support.references import BLUE, RED, pixels

SQUARE = grids(16, 16)["square"]
QUICK = {"seed": 7, "num_inference_steps": 3}
T = torch.tensor(500)


@pytest.fixture
def pipe(pipelines):
    return pipelines["demo"]


@pytest.fixture(params=["plain", "plus"])
def adapter(request, pipe):
    return ip_adapters.tensors(pipe.unet, request.param)


@pytest.fixture
def editor(pipe, adapter, tmp_path):
    editor = Editor(pipe, model="demo")
    editor.load_adapter(ip_adapters.save(adapter, tmp_path / "ip"), 0.6)
    return editor


def of_diffusers(pipe, prompt, picture, guidance=7.5):
    """Latents after every step [N, 4, h, w]."""
    path = []
    pipe(
        prompt,
        ip_adapter_image=picture,
        num_inference_steps=3,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(7),
        callback_on_step_end=lambda _, __, ___, state: path.append(state["latents"]) or state,
    )
    return torch.cat(path)


def latents(editor, result):
    return torch.cat(editor._trajectory_cache.get(result.id)[0].latents[1:])


@pytest.mark.parametrize("guidance", [7.5, 1.0], ids=["guided", "unguided"])
def test_a_source_is_the_pipelines_own(pipe, adapter, editor, guidance):
    expected = of_diffusers(ip_adapters.with_adapters(pipe, [adapter], [0.6]), CAT, RED, guidance)
    result = editor.generate(CAT, reference=RED, guidance_scale=guidance, **QUICK)
    assert oracle.deviation(latents(editor, result), expected) <= 1e-4
    plain = editor.generate(CAT, guidance_scale=guidance, **QUICK)
    assert oracle.deviation(latents(editor, plain), expected) > 0.1


def test_an_edit_of_everything_is_the_dense_one(pipe, adapter, editor):
    editor.generate(CAT, reference=BLUE, **QUICK)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), reference=RED)
    expected = of_diffusers(ip_adapters.with_adapters(pipe, [adapter], [0.6]), DOG, RED)
    assert oracle.deviation(latents(editor, result), expected) <= 1e-4


def test_one_of_stable_diffusion_xl_is_its_pipelines(pipelines, tmp_path):
    """A source, an edit of everything, and what an edit leaves outside."""
    pipe = pipelines["sdxl"]
    adapter, editor = ip_adapters.tensors(pipe.unet, "plus"), Editor(pipe)
    editor.load_adapter(ip_adapters.save(adapter, tmp_path / "ip"), 0.6)
    theirs = ip_adapters.with_adapters(pipe, [adapter], [0.6])
    source = editor.generate(CAT, reference=RED, **QUICK)
    assert oracle.deviation(latents(editor, source), of_diffusers(theirs, CAT, RED)) <= 1e-4
    sparse = editor.edit(DOG, mask=SQUARE, growth=1)
    assert pixels_outside(sparse, source) and sparse.stats.unet_evaluations_sparse
    editor.checkout(source.id)
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), reference=BLUE)
    assert oracle.deviation(latents(editor, result), of_diffusers(theirs, DOG, BLUE)) <= 1e-4
    other = ip_adapters.tensors(pipelines["demo"].unet, "plain")
    with pytest.raises(AdapterError, match=r"must have 23 attentions for this model, got 16"):
        editor.load_adapter(ip_adapters.save(other, tmp_path / "other"))


@pytest.mark.parametrize(("name", "projected"), [("ip-adapter_sdxl", 40), ("ip-adapter_sdxl_vit-h", 24)])
def test_plain_ones_of_stable_diffusion_xl_are_what_diffusers_loads(pipelines, tmp_path, name, projected):
    """Of either image encoder, in the folders in which they are published; of ViT-H it is not the one beside them."""
    pipe, file = pipelines["sdxl"], f"{name}.safetensors"
    adapter = ip_adapters.tensors(pipe.unet, "plain", projected=projected)
    for folder, width in (("models", 24), ("sdxl_models", 40)):
        ip_adapters.image_encoder(width).save_pretrained(tmp_path / folder / "image_encoder")
    path, editor = ip_adapters.save(adapter, tmp_path / "sdxl_models", file), Editor(pipe)
    own = None
    if projected == 24:
        with pytest.raises(AdapterError, match="must give 24 numbers, got one that gives 40; name the encoder"):
            editor.load_adapter(path)
        own = tmp_path / "models" / "image_encoder"
    editor.load_adapter(path, 0.6, image_encoder=own)
    theirs = assembled(pipe, unet=deepcopy(pipe.unet))
    encoder = {"image_encoder_folder": "models/image_encoder"} if own else {}
    theirs.load_ip_adapter(str(tmp_path), subfolder="sdxl_models", weight_name=file, **encoder)
    theirs.set_ip_adapter_scale(0.6)
    source = editor.generate(CAT, reference=RED, **QUICK)
    assert oracle.deviation(latents(editor, source), of_diffusers(theirs, CAT, RED)) <= 1e-4
    result = editor.edit(DOG, mask=np.ones((16, 16), bool), reference=BLUE)
    assert oracle.deviation(latents(editor, result), of_diffusers(theirs, DOG, BLUE)) <= 1e-4
    assert editor.adapters[-1].adapter.num_tokens == 4


def test_several_add_up(pipe, adapter, editor, tmp_path):
    other = ip_adapters.tensors(pipe.unet, "plain", seed=3)
    editor.load_adapter(ip_adapters.save(other, tmp_path / "other"), 0.3)
    result = editor.generate(CAT, reference=RED, **QUICK)
    both = ip_adapters.with_adapters(pipe, [adapter, other], [0.6, 0.3])
    assert oracle.deviation(latents(editor, result), of_diffusers(both, CAT, [RED, RED])) <= 1e-4


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("grid", ["square", "two"])
@pytest.mark.parametrize("batch", [2, 1], ids=["guided", "unguided"])
def test_a_sparse_step_is_the_mixed_forward(pipe, adapter, grid, batch):
    """E4, over a source that was recorded without the adapter."""
    mask = np.zeros((16, 16), bool)
    mask[3:7, 2:6] = True
    if grid == "two":
        mask[10:12, 9:14] = True
    inside, make = torch.from_numpy(mask), torch.Generator().manual_seed(0)
    source = torch.randn(batch, 4, 16, 16, generator=make)
    texts = torch.randn(2, batch, 11, pipe.unet.config.cross_attention_dim, generator=make)
    edited = torch.where(inside, torch.randn(source.shape, generator=make), source)
    embeds = torch.randn(batch, 1, ip_adapters.PROJECTED, generator=make)
    own = ip_adapters.with_adapters(pipe, [adapter], [0.6]).unet
    if "latents" in adapter["image_proj"]:
        embeds = torch.randn(batch, 1, 17, ip_adapters.WIDTH, generator=make)
    flat = {f"{part}.{key}": t for part, tensors in adapter.items() for key, t in tensors.items()}
    ours = build_ip_adapter(flat, pipe.unet, ip_adapters.image_encoder())
    ours.match(pipe.unet)
    tokens = ours.projection(embeds[:, 0])
    read = {name: (tokens @ key.T, tokens @ value.T) for name, (key, value) in ours._by_name.items()}
    condition, executor = ours.condition(read, AdapterUse(0.6), 2), Executor(pipe.unet)
    recording = oracle.record(pipe.unet, source, T, texts[0])
    maps = executor.run_dense(source, T, Conditioning(texts[0]), {})[1]
    plan = make_row_plan(mask, executor.num_levels)
    rows = executor.run_sparse(
        edited, T, Conditioning(texts[1]), {}, FeatureOverlay(maps, plan), extra_layers=AdapterStack([condition])
    )[0]
    own.forward = partial(own.forward, added_cond_kwargs={"image_embeds": [embeds]})
    expected = oracle.mixed_forward(own, recording, edited, T, texts[1], inside)
    assert oracle.deviation(rows, expected.flatten(2).transpose(1, 2)[:, inside.flatten()]) <= 1e-4
    stack = AdapterStack([condition])
    macs, without = (
        counted(
            lambda layers=layers: executor.run_sparse(
                edited, T, Conditioning(texts[1]), {}, FeatureOverlay(maps, plan), extra_layers=layers
            )
        )
        for layers in (stack, None)
    )
    grids_of = [(16 >> i, 16 >> i) for i in range(executor.num_levels)]
    assert macs - without == batch * condition.macs(pipe.unet, grids_of, plan, recorded=False)


def test_an_edit_takes_the_look_inside_its_mask_alone_and_reads_once(pipe, editor):
    source = editor.generate(CAT, **QUICK)
    results = []
    for picture in (None, RED, BLUE, RED):
        editor.checkout(source.id)
        with Calls(pipe.unet) as calls:
            results.append(editor.edit(DOG, mask=SQUARE, reference=picture))
        assert picture is None or (calls.dense, calls.sparse) == (0, 3)
    assert all(pixels_outside(result, source) for result in results)
    assert np.array_equal(pixels(results[1]), pixels(results[3]))
    assert len({pixels(result).tobytes() for result in results}) == 3
    assert [len(result.config.like) for result in results] == [0, 1, 1, 1]


def test_a_session_keeps_it(editor, tmp_path):
    editor.generate(CAT, **QUICK)
    before = editor.edit(DOG, mask=SQUARE, reference=RED)
    editor.save(tmp_path / "session")
    again = Editor(editor.pipe, model="demo")
    again.load(tmp_path / "session")
    assert again.current.config.like == before.config.like
    again.undo()
    assert np.array_equal(pixels(again.edit(DOG, mask=SQUARE, reference=RED)), pixels(before))


def test_a_file_of_a_folder_and_another_encoder(pipe, adapter, tmp_path):
    ip_adapters.save(adapter, tmp_path / "models", "a.safetensors")
    (tmp_path / "models/image_encoder").rename(tmp_path / "encoder")
    editor = Editor(pipe, model="demo")
    with pytest.raises(AdapterError, match="needs its image encoder"):
        editor.load_adapter(tmp_path / "models", weight_name="a.safetensors")
    editor.load_adapter(tmp_path, weight_name="models/a.safetensors", image_encoder=tmp_path / "encoder")
    with pytest.raises(AdapterError, match="loaded already"):
        editor.load_adapter(tmp_path / "models/a.safetensors", image_encoder=tmp_path / "encoder")
    with pytest.raises(AdapterError, match="has no such file"):
        editor.load_adapter(tmp_path, weight_name="models/b.safetensors")


def test_a_session_knows_where_the_encoder_is(pipelines, model, tmp_path):
    file = ip_adapters.save(ip_adapters.tensors(pipelines["demo"].unet, "plain"), tmp_path / "models")
    (tmp_path / "models/image_encoder").rename(tmp_path / "encoder")
    editor = Editor.from_pretrained(model, dtype="fp32", device="cpu")
    editor.load_adapter(file, 0.6, image_encoder=tmp_path / "encoder")
    editor.generate(CAT, **QUICK)
    before = editor.edit(DOG, mask=SQUARE, reference=RED)
    editor.save(tmp_path / "session")
    again = Editor.resume(tmp_path / "session", device="cpu")
    again.undo()
    assert np.array_equal(pixels(again.edit(DOG, mask=SQUARE, reference=RED)), pixels(before))
    again.save(tmp_path / "copy")
    (tmp_path / "encoder").rename(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match=r"needs its image encoder, got none in .*/encoder; name one") as raised:
        Editor.resume(tmp_path / "copy", device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("model", "file"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.float16)],
)
def test_a_file_of_another_precision(adapter, tmp_path, model, file):
    other = {part: {name: each.to(file) for name, each in own.items()} for part, own in adapter.items()}
    editor = Editor(build_pipeline("demo").to(model), model="demo")
    editor.load_adapter(ip_adapters.save(other, tmp_path / "ip"), 0.6)
    editor.generate(CAT, reference=RED, **QUICK)
    assert editor.edit(DOG, mask=SQUARE, reference=BLUE).prompt == DOG


def test_an_encoder_of_another_width_is_refused(pipe, adapter, tmp_path):
    file = ip_adapters.save(adapter, tmp_path / "ip")
    config = ip_adapters.image_encoder().config
    config.projection_dim, config.hidden_size = 40, 40
    CLIPVisionModelWithProjection(config).save_pretrained(tmp_path / "other")
    with pytest.raises(AdapterError, match=r"image encoder must give \d+ numbers, got one that gives 40; name"):
        Editor(pipe, model="demo").load_adapter(file, image_encoder=tmp_path / "other")


def test_an_encoder_that_is_not_whole_is_refused(pipe, adapter, tmp_path):
    file, editor = ip_adapters.save(adapter, tmp_path / "ip"), Editor(pipe, model="demo")
    encoder = tmp_path / "ip/image_encoder/model.safetensors"
    whole = load_file(encoder)
    save_file(
        {name: each for name, each in whole.items() if "visual_projection" not in name}, encoder, {"format": "pt"}
    )
    with pytest.raises(AdapterError, match="lacks 1 of its weights, such as visual_projection"):
        editor.load_adapter(file)
    encoder.write_bytes(encoder.read_bytes()[:1000])
    with pytest.raises(AdapterError, match="an image encoder must be") as raised:
        editor.load_adapter(file)
    assert "\n" not in str(raised.value)


def test_files_that_do_not_fit(pipe, pipelines, adapter, tmp_path):
    editor = Editor(pipe, model="demo")
    file = ip_adapters.save(ip_adapters.tensors(pipelines["sd15"].unet, "plain"), tmp_path / "sd15")
    with pytest.raises(AdapterError, match="the IP-Adapter's keys at"):
        editor.load_adapter(file)
    file = ip_adapters.save(adapter, tmp_path / "damaged")
    whole = load_file(file)
    save_file(
        whole | {"ip_adapter.1.to_k_ip.weight": torch.full_like(whole["ip_adapter.1.to_k_ip.weight"], torch.nan)}, file
    )
    with pytest.raises(NumericsError, match="NaN"):
        editor.load_adapter(file)
    save_file({name: t for name, t in whole.items() if name != "ip_adapter.1.to_v_ip.weight"}, file)
    with pytest.raises(AdapterError, match="plain, Plus or Full") as raised:
        editor.load_adapter(file)
    assert "\n" not in str(raised.value)
    assert len(cross_attention_names(pipe.unet)) == len([n for n in whole if n.endswith("to_k_ip.weight")])


@pytest.mark.parametrize("tokens", [4, 16], ids=["plain", "plus"])
def test_an_ip_adapter_adds_at_most_a_five_hundredth_to_a_dense_step(sd15_executor, tokens):
    levels = {site.name: site.level for site in unet_sites(sd15_executor.unet) if site.role is Role.QUERY}
    places = {
        name: (levels[f"{name}.to_q"], sd15_executor.unet.get_submodule(name).to_q.out_features)
        for name in cross_attention_names(sd15_executor.unet)
    }
    adapter = SimpleNamespace(num_tokens=tokens, places=places)
    added = IPAdapterCondition(adapter, None, 1.0).macs(sd15_executor.unet, SD15_GRIDS, None, recorded=False)
    assert 0 < added / unet_macs(sd15_executor.sites, SD15_SIZES, SD15_SIZES, 1, 77) <= 0.002


def test_a_file_with_a_tensor_that_no_ip_adapter_has_is_refused(pipe, tmp_path):
    path = ip_adapters.save(ip_adapters.tensors(pipe.unet, "plain"), tmp_path)
    save_file(load_file(path) | {"ip_adapter.1.to_q_lora.down.weight": torch.ones(2)}, path)
    with pytest.raises(AdapterError, match=r"got one with ip_adapter\.1\.to_q_lora\.down\.weight; load another"):
        Editor(pipe).load_adapter(path)
