"""A trained run as a pipeline that diffusers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline

from fisedit.models.vocabulary import VOCABULARY_FILE, read_vocabulary
from tests.support.quality import needs_font
from tests.support.stages import CONFIG, CPU, PLAN, denoiser_stage, small_autoencoder
from training.autoencoder import AutoencoderStage
from training.config import ConfigError
from training.denoiser import DenoiserStage
from training.export import load_run, write_vocabulary
from training.loop import train
from training.models import export
from training.pictures import Pictures
from training.train import CLOSEUPS, MODEL

pytestmark = needs_font


@pytest.mark.parametrize("stage", [DenoiserStage.name, CLOSEUPS])
def test_a_run_exports_as_a_pipeline(pictures: Pictures, tmp_path: Path, stage: str) -> None:
    model = small_autoencoder()
    model.save_pretrained(tmp_path / "run" / AutoencoderStage.name / MODEL)
    train(denoiser_stage(pictures), PLAN, tmp_path / "run" / stage, CPU)
    made = load_run(CONFIG, tmp_path / "run")
    export(made, tmp_path / "out")
    assert not any("_name_or_path" in path.read_text() for path in (tmp_path / "out").glob("*/config.json"))
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    assert {part.dtype for part in (loaded.unet, loaded.vae, loaded.text_encoder)} == {torch.float32}
    drawn = loaded(["a cat"], num_inference_steps=2, output_type="np").images
    assert drawn.shape == (1, 128, 128, 3)


def test_an_export_needs_finished_stages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train that stage first"):
        load_run(CONFIG, tmp_path)


def test_an_export_lists_its_words_and_keeps_what_a_hand_wrote(tmp_path: Path) -> None:
    (tmp_path / VOCABULARY_FILE).write_text('{"words": ["spaceship"], "summary": "it draws cats"}')
    write_vocabulary(("cat", "castle"), tmp_path)
    vocabulary = read_vocabulary(tmp_path)
    assert vocabulary is not None and vocabulary.summary == "it draws cats"
    assert vocabulary.unknown_words("a red cat and a castle on a beach, a dog, a spaceship") == ("dog", "spaceship")
