"""The control network's training: poses of drawn heads, a loss that its own weights lower, a file that loads."""

from __future__ import annotations

import pytest
import torch
from diffusers import StableDiffusionPipeline

from benchmarks.scenes.held_out import is_unseen
from fisedit.adapters.hellomeme.drive_files import load_control_network
from fisedit.models.paths import demo_folder
from tests.support.quality import needs_font
from tests.support.stages import descend
from training import pose

pytestmark = needs_font


@pytest.fixture(scope="module")
def pipeline():
    return StableDiffusionPipeline.from_pretrained(demo_folder(), dtype=torch.float32, local_files_only=True)


@pytest.fixture(scope="module")
def scenes(pipeline, tmp_path_factory):
    return pose.load_or_draw(tmp_path_factory.mktemp("scenes"), pipeline, 1, 12, ("cat", "dog", "cake"))


def test_scenes_are_seen_ones_of_the_words(scenes):
    posed = list(pose.sampled(1, 40, ("cat", "dog", "cake")))
    assert not any(is_unseen(each.scene) for each in posed)
    assert {placed.word for each in posed for placed in each.scene.objects} == {"cat", "dog", "cake"}
    assert 0 < sum(each == each.at_rest for each in posed) < 20
    assert len(scenes) == 12 and scenes.heads.max() == 1 and torch.isfinite(scenes.means).all()


@pytest.mark.slow
def test_the_network_learns_and_its_model_stays(pipeline, scenes, tmp_path):
    before = {name: weight.clone() for name, weight in pipeline.unet.state_dict().items()}
    stage = pose.PoseStage(pipeline, scenes, 6, 0)
    plain = stage.losses(0)["loss"]
    assert descend(stage, stage.model.parameters(), 3e-3, 6) < 0.98 * plain
    assert all(not weight.requires_grad for weight in stage.unet.parameters())
    after = stage.unet.state_dict()
    assert all(torch.equal(after[name].reshape(weight.shape), weight) for name, weight in before.items())
    pose.save_network(stage.network, tmp_path / "control")
    loaded = load_control_network(tmp_path / "control")
    loaded.check_fit(pipeline.unet)
    assert loaded.channels == stage.network.channels and loaded.network.reads_expressions
