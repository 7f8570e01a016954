"""Stable Diffusion XL by the same engine: conditions, pictures and opened pictures are diffusers' own."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from compel import Compel, ReturnedEmbeddingsType
from diffusers import StableDiffusionXLImg2ImgPipeline
from PIL import Image

from fisedit import Editor
from fisedit.adapters.row_column.checkpoints import fresh_adapter
from fisedit.diagnosis.layer_times import layer_seconds
from fisedit.errors import AdapterError, InputError
from fisedit.integrations.diffusers_pipeline import FisEditPipeline
from fisedit.metadata.image_metadata import read_metadata
from fisedit.metadata.provenance import parse_origin, source_arguments
from fisedit.models.families.conditioning import check_reads_text_alone
from fisedit.sampling.engine import Engine
from tests.support import oracle
from tests.support.edits import (
    CAT,
    DOG,
    FP32,
    as_oracle,
    check_outside,
    check_pinned,
    config_of,
    latents,
    record,
    trajectory,
)
from tests.support.pictures import scene
from tests.support.pipelines import build_pipeline, with_scheduler

pytestmark = pytest.mark.usefixtures("no_grad")

EVERYWHERE = np.ones((16, 16), bool)


@pytest.fixture
def pipe(pipelines):
    return pipelines["sdxl"]


def expected_of(pipe, prompt, negative, **options):
    """What diffusers' pipeline gives to its UNet: embeddings and pooled ones, the negative prompt's first."""
    text, empty, pooled, empty_pooled = pipe.encode_prompt(prompt, None, "cpu", 1, True, negative, **options)
    return torch.cat([empty, text]), torch.cat([empty_pooled, pooled])


@pytest.mark.parametrize("negative", ["", "a dog"])
@pytest.mark.parametrize("zeros", [True, False])
def test_conditions_are_diffusers_own(pipe, negative, zeros):
    """An empty negative prompt is none: all zeros where the model says so."""
    try:
        pipe.register_to_config(force_zeros_for_empty_prompt=zeros)
        text, pooled = expected_of(pipe, CAT, negative or None)
        got = Engine(pipe).encode(config_of(negative_prompt=negative, height=192, width=128))
    finally:
        pipe.register_to_config(force_zeros_for_empty_prompt=True)
    assert torch.equal(got.text, text) and torch.equal(got.added["text_embeds"], pooled)
    assert got.added["time_ids"].tolist() == [[192, 128, 0, 0, 192, 128]] * 2
    assert got.text[0].any() != (zeros and not negative)


def test_layers_are_left_out_as_diffusers_does(pipe):
    text, _ = expected_of(pipe, CAT, None)
    with pytest.raises(InputError, match="clip_skip must leave a layer of the text encoder's 2, got 2"):
        Engine(pipe).encode(config_of(clip_skip=1))
    pipe = build_pipeline("sdxl", layers=3)
    text, pooled = expected_of(pipe, CAT, None, clip_skip=1)
    got = Engine(pipe).encode(config_of(clip_skip=1))
    assert torch.equal(got.text, text) and torch.equal(got.added["text_embeds"], pooled)


def test_weights_are_compels_and_move_no_pooled_embedding(pipe):
    theirs = Compel(
        tokenizer=[pipe.tokenizer, pipe.tokenizer_2],
        text_encoder=[pipe.text_encoder, pipe.text_encoder_2],
        returned_embeddings_type=ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED,
        requires_pooled=[False, True],
    )
    expected, _ = theirs("a (cat)1.4 on a beach")
    got = Engine(pipe).encode(config_of("a (cat:1.4) on a beach", guidance_scale=1.0))
    plain = Engine(pipe).encode(config_of("a  cat      on a beach", guidance_scale=1.0))
    torch.testing.assert_close(got.text, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(got.text, plain.text)
    assert torch.equal(got.added["text_embeds"], plain.added["text_embeds"])


def test_a_long_prompt_has_the_pooled_embedding_of_its_first_chunk(pipe):
    long, first = (Engine(pipe).encode(config_of(f"{CAT}{more}")) for more in (" BREAK a dog", ""))
    assert long.tokens == 154 and torch.equal(long.text[:, :77], first.text)
    assert torch.equal(long.added["text_embeds"], first.added["text_embeds"])


@pytest.mark.parametrize("size", [(128, 128), (192, 128)], ids=["square", "portrait"])
@pytest.mark.parametrize(("scheduler", "guidance"), [("euler", 7.5), ("ddim", 1.0)])
def test_a_picture_is_diffusers_own(pipe, size, scheduler, guidance):
    editor = Editor(pipe)
    options = {"height": size[0], "width": size[1], "scheduler": scheduler, "guidance_scale": guidance}
    result = editor.generate(CAT, seed=7, num_inference_steps=3, **options)
    dense = oracle.dense_generate(with_scheduler(pipe, scheduler), as_oracle(result.config))
    assert oracle.deviation(latents(trajectory(editor, result)), dense.latents) <= FP32
    assert np.abs(np.asarray(result.image, int) - np.asarray(dense.image, int)).max() <= 1


SIZES = {"original_size": (96, 200), "crops_coords_top_left": (8, 24), "target_size": (160, 128)}
NEGATIVE = {
    "negative_original_size": (64, 64),
    "negative_crops_coords_top_left": (3, 5),
    "negative_target_size": (512, 256),
}


@pytest.mark.parametrize("sizes", [SIZES, SIZES | NEGATIVE, {"target_size": (64, 64)}], ids=["", "both", "target"])
def test_sizes_are_told_as_diffusers_does(pipe, sizes):
    editor = Editor(pipe)
    result = editor.generate(CAT, seed=7, num_inference_steps=2, width=128, height=128, sizes=sizes)
    config = as_oracle(result.config)
    expected = pipe(
        CAT,
        latents=oracle.first_latents(pipe, config),
        num_inference_steps=2,
        guidance_scale=config.guidance,
        output_type="latent",
        **sizes,
    ).images
    assert oracle.deviation(latents(trajectory(editor, result))[-1], expected) <= FP32
    assert oracle.deviation(expected, latents(trajectory(editor, editor.generate(CAT, seed=7, **SMALL)))[-1]) > 1e-4
    options = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(7)}
    assert FisEditPipeline(editor)(CAT, **options, **sizes).images[0].tobytes() == result.image.tobytes()


SMALL = {"num_inference_steps": 2, "width": 128, "height": 128}


def test_sizes_stay_with_a_picture(pipe, tmp_path):
    """Its edits are told them too, a session and a file keep them, and an opened picture has its own."""
    pipe.save_pretrained(tmp_path / "model")
    editor, mask = Editor.from_pretrained(tmp_path / "model", dtype="fp32"), np.pad(np.ones((4, 4), bool), 6)
    source = editor.generate(CAT, sizes=SIZES, **SMALL)
    told = Engine(pipe).encode(source.config).added["time_ids"]
    assert told.tolist() == [[96, 200, 8, 24, 160, 128]] * 2
    assert editor.edit(DOG, mask=mask).config.sizes == source.config.sizes
    editor.save(tmp_path / "session")
    assert Editor.resume(tmp_path / "session").current.config.sizes == source.config.sizes
    editor.write(tmp_path / "edit.png")
    with Image.open(tmp_path / "edit.png") as opened:
        origin = parse_origin(read_metadata(opened))
    assert origin.config.sizes == source.config.sizes
    assert source_arguments(origin, {})["sizes"]["original_size"] == (96, 200)
    assert editor.open(scene(), CAT, num_inference_steps=2, sizes=SIZES).config.sizes == source.config.sizes


def test_other_models_refuse_sizes(pipelines):
    editor = Editor(pipelines["sd15"])
    words = r"sizes are read by Stable Diffusion XL alone, got original_size, crops_coords_top_left, target_size and"
    for make in (editor.generate, partial(editor.open, scene())):
        with pytest.raises(InputError, match=words):
            make(CAT, num_inference_steps=2, sizes=SIZES)
    assert editor.generate(CAT, sizes={"crops_coords_top_left": (0, 0)}, **SMALL).config.sizes is None


@pytest.mark.parametrize("changed", ["text_embeds", "time_ids"])
def test_a_picture_depends_on_what_is_added(pipe, changed, monkeypatch):
    engine, config = Engine(pipe), config_of(num_inference_steps=1)
    encode, before = engine.encode, latents(record(engine, config))

    def other(config):
        conditions = encode(config)
        conditions.added[changed].add_(1)
        return conditions

    monkeypatch.setattr(engine, "encode", other)
    assert oracle.deviation(latents(record(engine, config)), before) > 1e-3


@pytest.mark.parametrize("start", [0, 2])
def test_an_edit_of_an_opened_picture_is_diffusers_image_to_image(pipe, start):
    """From the latents of its path on, in a full mask."""
    editor = Editor(pipe)
    source = editor.open(scene(), CAT, num_inference_steps=4, inversion="ddim")
    result = editor.edit(DOG, mask=EVERYWHERE, strength=1 - start / 4)
    path, timesteps = trajectory(editor, source).latents, editor._engine.sampler(source.config).timesteps
    theirs = StableDiffusionXLImg2ImgPipeline(**pipe.components, add_watermarker=False)
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(
        DOG,
        image=path[start],
        num_inference_steps=4,
        guidance_scale=source.config.guidance_scale,
        denoising_start=1 - (int(timesteps[start]) + 1) / 1000,
        output_type="latent",
    ).images
    assert oracle.deviation(trajectory(editor, result).latents[-1], expected) <= FP32


def test_editors_of_one_pipeline_share_its_model(pipe):
    first, second = Editor(pipe), Editor(pipe)
    assert first.pipe is second.pipe and first.pipe.text_encoder is second.pipe.text_encoder
    assert first.beside().pipe is Editor(first.pipe).pipe is first.pipe


def test_a_scheduler_that_is_set_is_the_pipelines(pipe):
    editor, own = Editor(pipe), pipe.scheduler
    try:
        editor.pipe.scheduler = other = with_scheduler(pipe, "euler").scheduler
        assert pipe.scheduler is other
    finally:
        pipe.scheduler = own


@pytest.mark.parametrize("prompt", [DOG, "a cake on a beach"], ids=["replaced", "deleted"])
def test_an_edit_moves_nothing_outside(pipe, prompt):
    editor, mask = Editor(pipe), np.pad(np.ones((4, 4), bool), 6)
    source = editor.generate(CAT, seed=7, num_inference_steps=3)
    result = editor.edit(prompt, mask=mask, growth=1)
    check_outside(editor, result, source)
    check_pinned(trajectory(editor, result), trajectory(editor, source), mask)
    assert result.stats.unet_evaluations_sparse


def test_an_autoencoder_in_fp32_beside_a_model_in_16_bit():
    """Pictures, opened ones, edits and previews, as by diffusers, which upcasts latents."""
    pipe = build_pipeline("sdxl").to(torch.bfloat16)
    pipe.vae.float()
    editor, mask = Editor(pipe), np.pad(np.ones((4, 4), bool), 6)
    source = editor.generate(CAT, seed=7, num_inference_steps=2)
    found = latents(trajectory(editor, source))[-1:]
    assert found.dtype == torch.bfloat16
    expected = pipe.image_processor.postprocess(oracle.dense_decode(pipe, found.float()), output_type="pil")[0]
    assert np.abs(np.asarray(source.image, int) - np.asarray(expected, int)).max() <= 1
    check_outside(editor, editor.edit(DOG, mask=mask, growth=1, on_step=lambda *_: None), source)
    opened = editor.open(scene(), CAT, num_inference_steps=2)
    assert latents(trajectory(editor, opened)).dtype == torch.bfloat16
    assert opened.image.tobytes() == editor.edit(CAT).image.tobytes()
    check_outside(editor, editor.edit(DOG, mask=mask, growth=1), opened)


def test_adapters_of_other_families_refuse_it_by_name(pipe):
    for what in ("a control network of HelloMeme", "a motion adapter", "a reference adapter"):
        with pytest.raises(AdapterError, match=rf"{what} is for Stable Diffusion 1.x and 2.x, got Stable Diffusion XL"):
            check_reads_text_alone(pipe.unet, what)
    with pytest.raises(AdapterError, match="a reference adapter is for"):
        fresh_adapter(pipe.unet, "v3", heads=2)


def test_its_layers_are_timed(pipe):
    timed = layer_seconds(Editor(pipe).pipe, 64, 0.0)
    assert {"conv_in", "conv_out"} <= timed.keys() and all(seconds > 0 for seconds in timed.values())
