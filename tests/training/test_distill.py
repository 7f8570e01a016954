"""The distilled LoRA's training: where all it knows comes from, a loss that it lowers, a file that loads."""

from __future__ import annotations

import pytest
import torch
from diffusers import LCMScheduler, StableDiffusionPipeline

from fisedit import Editor
from fisedit.adapters.lora import SuggestedSampling, suggested_sampling
from fisedit.models.paths import demo_folder
from fisedit.values import SchedulerName
from tests.support.quality import needs_font
from tests.support.stages import descend
from training.distill import DistilledStage, save_lora
from training.latents import encode_scenes

pytestmark = needs_font


@pytest.fixture(scope="module")
def pipeline():
    return StableDiffusionPipeline.from_pretrained(demo_folder(), dtype=torch.float32, local_files_only=True)


@pytest.fixture(scope="module")
def stage(pipeline):
    return DistilledStage(pipeline, encode_scenes(pipeline.vae, 1, 12, objects=("cat", "dog", "cake")), 3, 0)


def test_beyond_the_clean_end_latents_are_kept(stage):
    latents = torch.randn(2, 4, 32, 32)
    text = stage.no_text.expand(2, -1, -1)
    found = stage.consistent(stage.model, latents, torch.tensor([-61, 19]), text)
    assert torch.equal(found[0], latents[0]) and not torch.equal(found[1], latents[1])


def test_a_step_is_lcms(pipeline, stage):
    """What is found of a step's latents is what LCM's scheduler makes of the same prediction."""
    scheduler = LCMScheduler.from_config(pipeline.scheduler.config)
    scheduler.set_timesteps(4)
    latents, timestep = torch.randn(1, 4, 32, 32), scheduler.timesteps[1]
    guess = stage.teacher(latents, timestep, stage.no_text).sample
    expected = scheduler.step(guess, timestep, latents).denoised
    found = stage.consistent(stage.teacher, latents, timestep[None], stage.no_text)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_lora_learns_and_its_file_loads_whole(pipeline, stage, tmp_path):
    trained = [weight for weight in stage.model.parameters() if weight.requires_grad]
    assert sum(weight.numel() for weight in trained) < 0.3 * sum(w.numel() for w in stage.teacher.parameters())
    plain = stage.losses(0)["loss"]
    assert descend(stage, trained, 1e-3, 4) < 0.95 * plain
    save_lora(stage.model, tmp_path)
    assert suggested_sampling(tmp_path) == SuggestedSampling(SchedulerName.LCM, 4, 1.0)
    editor = Editor.from_pretrained("demo", device="cpu", dtype="fp32")
    editor.load_lora(tmp_path)  # which refuses a file of which a part alone would count
    latents, timestep = torch.randn(1, 4, 32, 32), torch.tensor([499])
    with torch.no_grad():
        expected = stage.model(latents, timestep, stage.no_text).sample
        got = editor.pipe.unet(latents, timestep, stage.no_text).sample
    torch.testing.assert_close(got, expected, atol=5e-2, rtol=0)  # weights are saved in half precision
