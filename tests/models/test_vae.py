"""Previews: colours of cells, or what an `AutoencoderTiny` of the user's own decodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from fisedit import Editor
from fisedit.errors import ModelError
from fisedit.models import vae
from fisedit.models.loader import load
from fisedit.models.vae import preview
from tests.support.edits import CAT
from tests.support.pipelines import build_pipeline

OFFLINE = {"device": "cpu", "dtype": "fp32", "local_files_only": True}


def tiny(levels: int = 4) -> AutoencoderTiny:
    torch.manual_seed(3)
    widths, blocks = (8,) * levels, (1,) * levels
    return AutoencoderTiny(
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        num_encoder_blocks=blocks,
        num_decoder_blocks=blocks,
    ).eval()


def test_a_tiny_autoencoder_decodes_what_on_step_gets(model, tmp_path):
    tiny().save_pretrained(tmp_path / "tiny")
    editor = Editor.from_pretrained(model, preview_vae=tmp_path / "tiny", **OFFLINE)
    seen = []
    editor.generate(CAT, num_inference_steps=2, width=72, height=64, on_step=lambda i, n, picture: seen.append(picture))
    assert [picture.size for picture in seen] == [(72, 64)] * 2
    latents = torch.randn(1, 4, 8, 9, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = VaeImageProcessor().postprocess(tiny().decode(latents).sample, output_type="pil")[0]
    assert np.array_equal(preview(editor.pipe, latents), expected)


def test_without_one_a_preview_has_a_pixel_for_each_cell(pipelines):
    assert preview(pipelines["demo"], torch.zeros(1, 4, 8, 9)).size == (9, 8)


def test_previews_look_like_their_picture():
    """The first estimates are several times as strong as latents of a picture, and were black and white."""
    editor, seen = Editor.from_pretrained("demo"), []
    options = {"num_inference_steps": 8, "seed": 3, "guidance_scale": 4.0}
    result = editor.generate(CAT, **options, on_step=lambda i, n, picture: seen.append(np.asarray(picture, float)))
    final = np.asarray(result.image.resize(seen[0].shape[1::-1], Image.Resampling.BOX), float)
    for picture in seen[1:]:
        assert abs(picture.mean() - final.mean()) < 25 and abs(picture.std() - final.std()) < 15
        assert np.isin(picture, (0, 255)).mean() < 0.3
    assert abs(seen[-1].mean() - final.mean()) < 10 and np.abs(seen[-1] - final).mean() < 20


def test_previews_follow_the_weights_and_their_device(monkeypatch):
    pipe, latents = build_pipeline("shallow"), torch.zeros(1, 4, 8, 9)
    before = np.asarray(preview(pipe, latents))
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias += 0.5
    assert (np.asarray(preview(pipe, latents)) > before).any()
    fitted = []
    monkeypatch.setattr(vae, "_fitted", lambda own: fitted.append(own.device) or torch.zeros(5, 3))
    monkeypatch.setattr(type(pipe.vae), "device", torch.device("meta"))
    for _ in range(2):
        preview(pipe, latents)
    assert fitted == [torch.device("meta")]


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (lambda folder: None, "preview_vae must be a folder with an AutoencoderTiny, got .*: no such folder"),
        (lambda folder: tiny(3).save_pretrained(folder), "decoder_block_out_channels must be 4 numbers"),
        (lambda folder: AutoencoderKL().save_pretrained(folder), "class must be AutoencoderTiny, got 'AutoencoderKL'"),
    ],
    ids=["missing", "three levels", "not tiny"],
)
def test_others_are_refused_in_one_line(model, tmp_path, save, message):
    save(tmp_path / "folder")
    with pytest.raises(ModelError, match=message):
        load(model, preview_vae=tmp_path / "folder", **OFFLINE)
