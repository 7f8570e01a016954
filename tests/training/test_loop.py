"""Each stage takes its steps, resumes to the same state, and ends in a pipeline that diffusers loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.scenes import drawing
from benchmarks.scenes.prompts import parse_prompt
from tests.support.stages import (
    CONFIG,
    CPU,
    PLAN,
    autoencoder_stage,
    decoder_stage,
    denoiser_stage,
    held_out,
    small_autoencoder,
)
from training import classifier, evaluate
from training.autoencoder import AutoencoderStage, DecoderStage, build_autoencoder, reconstruct
from training.config import Plan
from training.denoiser import SHOWN, DenoiserStage
from training.latents import encode_scenes, normalise_latents
from training.loop import Stage, train
from training.models import build_unet
from training.pictures import Pictures, to_tensor
from training.train import MODEL, train_denoiser

pytestmark = pytest.mark.skipif(
    not any(path.is_file() for path in drawing.FONT_PATHS), reason="Noto Color Emoji is not installed"
)


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("make", [autoencoder_stage, decoder_stage, denoiser_stage])
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    make: Callable[[Pictures], Stage], pictures: Pictures, tmp_path: Path
) -> None:
    whole, first, second = make(pictures), make(pictures), make(pictures)
    start = [weight.clone() for weight in whole.model.parameters()]
    unbroken = train(whole, PLAN, tmp_path / "whole", CPU)
    interrupted = replace(PLAN, report_every=2)
    with pytest.raises(KeyboardInterrupt):
        train(_Interrupted(first, after=2), interrupted, tmp_path / "broken", CPU)
    resumed = train(second, PLAN, tmp_path / "broken", CPU)
    assert any(not torch.equal(old, new) for old, new in zip(start, whole.model.parameters(), strict=True))
    assert same(whole.model, second.model)
    assert same(unbroken, resumed)


class _Interrupted:
    """A stage whose run is broken off before one of its steps."""

    def __init__(self, stage: Stage, after: int) -> None:
        self.name, self.model, self.report = stage.name, stage.model, stage.report
        self.stage, self.after = stage, after

    def losses(self, step: int) -> dict[str, Tensor]:
        if step == self.after:
            raise KeyboardInterrupt
        return self.stage.losses(step)


def test_the_decoder_stage_leaves_the_encoder_alone(pictures: Pictures, tmp_path: Path) -> None:
    stage, before = DecoderStage(CONFIG, small_autoencoder(), pictures, held_out(pictures), CPU), small_autoencoder()
    train(stage, PLAN, tmp_path, CPU)
    assert same(stage.model.encoder, before.encoder)
    assert same(stage.model.quant_conv, before.quant_conv)
    assert not same(stage.model.decoder, before.decoder)


def test_normalising_latents_keeps_the_reconstruction(pictures: Pictures) -> None:
    model = small_autoencoder()
    with torch.no_grad():
        model.quant_conv.bias += torch.arange(8) / 4
    before = model.decode(model.encode(to_tensor(pictures.pixels)).latent_dist.mode()).sample
    normalise_latents(model, to_tensor(pictures.pixels))
    latents = model.encode(to_tensor(pictures.pixels)).latent_dist.mode()
    scaled = latents * model.config.scaling_factor
    assert torch.allclose(model.decode(latents).sample, before, atol=1e-4)
    assert torch.allclose(scaled.mean((0, 2, 3)), torch.zeros(4), atol=1e-4)
    assert torch.allclose(scaled.std((0, 2, 3)), torch.ones(4), atol=1e-3)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The latents' side in every step of a denoiser that is trained; it draws no sheets."""
    seen: list[int] = []
    losses = DenoiserStage.losses

    def noted(stage: DenoiserStage, step: int) -> dict[str, Tensor]:
        seen.append(stage.scenes.means.shape[-1])
        return losses(stage, step)

    monkeypatch.setattr(DenoiserStage, "losses", noted)
    monkeypatch.setattr(DenoiserStage, "report", lambda *_: {})
    return seen


def state_of(folder: Path, name: str, prefix: str = "") -> dict[str, Tensor]:
    """The weights in a checkpoint, their names without `prefix`."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)[name]
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def test_the_denoiser_goes_on_from_close_ups_to_whole_scenes(tmp_path: Path, sides: list[int]) -> None:
    """A second phase that learns nothing ends with the weights that the first one found."""
    small_autoencoder().save_pretrained(tmp_path / AutoencoderStage.name / MODEL)
    idle = replace(CONFIG.denoiser, plan=replace(PLAN, batch=1, steps=2, learning_rate=0.0))
    train_denoiser(replace(CONFIG, denoiser=idle), tmp_path, CPU)
    assert sides == [16] * 3 + [32] * 2
    averaged = state_of(tmp_path / "closeups", "averaged", "module.")
    trained, carried = state_of(tmp_path / "closeups", "model"), state_of(tmp_path / DenoiserStage.name, "model")
    assert carried.keys() == averaged.keys()
    assert all(torch.equal(carried[name], averaged[name]) for name in carried)
    assert any(not torch.equal(trained[name], averaged[name]) for name in trained)


def test_a_finished_phase_is_not_trained_again(tmp_path: Path, sides: list[int]) -> None:
    small_autoencoder().save_pretrained(tmp_path / AutoencoderStage.name / MODEL)
    config = replace(CONFIG, denoiser=replace(CONFIG.denoiser, plan=replace(PLAN, batch=1, steps=2)))
    train_denoiser(config, tmp_path, CPU)
    first = state_of(tmp_path / DenoiserStage.name, "averaged")
    sides.clear()
    train_denoiser(config, tmp_path, CPU)
    assert sides == []
    for name in ("checkpoint.pt", "averaged.pt"):
        (tmp_path / DenoiserStage.name / name).unlink()
    train_denoiser(config, tmp_path, CPU)
    again = state_of(tmp_path / DenoiserStage.name, "averaged")
    assert sides == [32] * 2
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_run_can_start_from_another_pipeline(pictures: Pictures, tmp_path: Path) -> None:
    torch.manual_seed(5)
    autoencoder, unet = build_autoencoder(CONFIG.autoencoder, 128), build_unet(CONFIG.denoiser, 16)
    autoencoder.save_pretrained(tmp_path / "vae")
    unet.save_pretrained(tmp_path / "unet")
    scenes = encode_scenes(autoencoder, 1, 2, close=True)
    for config, known in ((replace(CONFIG, start=str(tmp_path)), True), (CONFIG, False)):
        assert same(AutoencoderStage(config, pictures, held_out(pictures), CPU).model, autoencoder) == known
        started = DenoiserStage(config, PLAN, autoencoder, scenes, scenes, CPU)
        assert same(started.model.get_submodule("unet"), unet) == known
        assert torch.isfinite(started.losses(0)["loss"])


def test_parts_of_the_start_can_be_left_out(tmp_path: Path) -> None:
    unet, autoencoder = build_unet(CONFIG.denoiser, 16), small_autoencoder()
    unet.save_pretrained(tmp_path / "unet")
    scenes = encode_scenes(autoencoder, 1, 2, close=True)
    config = replace(CONFIG, start=str(tmp_path), start_without=("attn2.to_q",))
    started = DenoiserStage(config, PLAN, autoencoder, scenes, scenes, CPU).model.get_submodule("unet").state_dict()
    known = unet.state_dict()
    changed = {name for name in known if not torch.equal(known[name], started[name].reshape(known[name].shape))}
    assert changed == {name for name in started if "attn2.to_q" in name}


def test_a_frozen_text_encoder_stays_as_it_was(tmp_path: Path) -> None:
    autoencoder = small_autoencoder()
    scenes = encode_scenes(autoencoder, 1, 2, close=True)
    stage = DenoiserStage(replace(CONFIG, frozen=("text_encoder",)), PLAN, autoencoder, scenes, scenes, CPU)
    before = {name: weight.clone() for name, weight in stage.model.state_dict().items()}
    trained = train(stage, PLAN, tmp_path, CPU).state_dict()
    stayed = {name.split(".")[0] for name in before if torch.equal(before[name], trained[name])}
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], trained[name])}
    assert "text_encoder" in stayed
    assert changed == {"unet"}


def test_a_phase_takes_batches_of_its_own_plan() -> None:
    autoencoder, sizes = small_autoencoder(), []
    scenes = encode_scenes(autoencoder, 1, 2, close=True)
    stage = DenoiserStage(CONFIG, replace(PLAN, batch=3), autoencoder, scenes, scenes, CPU)
    stage.model.get_submodule("unet").register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    stage.losses(0)
    assert sizes == [3]


def test_a_report_shows_pictures_and_a_held_out_loss(pictures: Pictures, tmp_path: Path) -> None:
    model = small_autoencoder()
    scenes = encode_scenes(model, 1, len(pictures.scenes), close=True)
    stage = DenoiserStage(CONFIG, PLAN, model, scenes, scenes, CPU)
    found = stage.report(stage.model, tmp_path / "sheet.png")
    assert found["loss"] > 0
    assert found == stage.report(stage.model, tmp_path / "again.png")
    assert (tmp_path / "sheet.png").read_bytes() == (tmp_path / "again.png").read_bytes()


@pytest.mark.parametrize("prompt", [*SHOWN, *evaluate._EDITS])
def test_the_sheets_show_what_scenes_can_say(prompt: str) -> None:
    assert parse_prompt(prompt).objects


def test_the_judge_learns_from_fresh_scenes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(classifier, "PLAN", replace(classifier.PLAN, batch=4))
    monkeypatch.setattr(classifier, "_HELD_OUT", 12)
    stage = classifier.ClassifierStage(1, 64)
    loss = stage.losses(0)["loss"]
    loss.backward()
    assert torch.equal(stage.losses(0)["loss"], loss)
    assert not torch.equal(stage.losses(1)["loss"], loss)
    assert all(weight.grad is not None and weight.grad.any() for weight in stage.model.parameters())
    assert all(0 <= share <= 1 for share in stage.report(stage.model, tmp_path).values())


def test_pictures_survive_the_way_to_tensors_and_back(pictures: Pictures) -> None:
    assert reconstruct(small_autoencoder(), pictures.pixels).shape == pictures.pixels.shape


class Hopeless:
    """A stage whose loss is infinite at some steps."""

    name = "hopeless"

    def __init__(self, steps: set[int]) -> None:
        self.model: torch.nn.Module = torch.nn.Linear(2, 1)
        self.steps = steps

    def losses(self, step: int) -> dict[str, torch.Tensor]:
        found = self.model(torch.ones(1, 2)).square().mean()
        return {"loss": found * float("inf") if step in self.steps else found}

    def report(self, averaged: torch.nn.Module, sheet: Path) -> dict[str, float]:
        return {"weight": float(sum(weight.detach().sum() for weight in averaged.parameters()))}


def test_a_batch_without_finite_gradients_teaches_nothing_and_many_end_the_run(tmp_path: Path) -> None:
    plan, device = Plan(batch=1, seconds=1e9, steps=40, learning_rate=1e-2, warmup=1), torch.device("cpu")
    stage = Hopeless({3, 9})
    averaged = train(stage, plan, tmp_path / "now and then", device)
    assert all(weight.isfinite().all() for weight in averaged.parameters())
    with pytest.raises(FloatingPointError, match="21 batches in a row"):
        train(Hopeless(set(range(5, 40))), plan, tmp_path / "for good", device)
