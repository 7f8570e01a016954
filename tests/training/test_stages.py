"""Each stage takes its steps, resumes to the same state, and ends in a pipeline that diffusers loads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from torch import nn

from training import drawing
from training.autoencoder import AutoencoderStage, DecoderStage, build_autoencoder, reconstruct
from training.config import Autoencoder, Config, ConfigError, Decoder, Denoiser, Plan, Scenes, load_config
from training.denoiser import DenoiserStage
from training.export import load_run
from training.latents import encode_scenes, normalise_latents
from training.loop import Stage, train
from training.models import export
from training.pictures import Pictures, draw_pictures, to_tensor
from training.train import HERE, MODEL

pytestmark = pytest.mark.skipif(
    not any(path.is_file() for path in drawing.FONT_PATHS), reason="Noto Color Emoji is not installed"
)
CPU = torch.device("cpu")
PLAN = Plan(batch=2, seconds=1e9, steps=3, learning_rate=1e-3, warmup=1, log_every=1, report_every=100)
CONFIG = Config(
    seed=1,
    scenes=Scenes(count=4, held_out=2),
    autoencoder=Autoencoder(PLAN, channels=(8, 8, 8, 8)),
    decoder=Decoder(PLAN),
    denoiser=Denoiser(
        PLAN, channels=(8, 8, 16), groups=4, heads=2, text_width=16, text_heads=2, text_layers=1, pictures=4
    ),
)


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    return draw_pictures(1, 4, 128)


def small_autoencoder() -> AutoencoderKL:
    torch.manual_seed(0)
    return build_autoencoder(CONFIG.autoencoder, 128)


def autoencoder_stage(pictures: Pictures) -> Stage:
    return AutoencoderStage(CONFIG, pictures, pictures, CPU)


def decoder_stage(pictures: Pictures) -> Stage:
    return DecoderStage(CONFIG, small_autoencoder(), pictures, pictures, CPU)


def denoiser_stage(pictures: Pictures) -> Stage:
    model = small_autoencoder()
    scenes = encode_scenes(model, 1, 4, pictures.side)
    stage = DenoiserStage(CONFIG, model, scenes, scenes, CPU)
    stage.report = lambda averaged, sheet: {}  # type: ignore[method-assign]  # sampling has its own test below
    return stage


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


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

    def losses(self, step: int) -> dict[str, torch.Tensor]:
        if step == self.after:
            raise KeyboardInterrupt
        return self.stage.losses(step)


def test_the_decoder_stage_leaves_the_encoder_alone(pictures: Pictures, tmp_path: Path) -> None:
    stage, before = DecoderStage(CONFIG, small_autoencoder(), pictures, pictures, CPU), small_autoencoder()
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


def test_a_run_exports_as_a_pipeline(pictures: Pictures, tmp_path: Path) -> None:
    model = small_autoencoder()
    model.save_pretrained(tmp_path / "run" / AutoencoderStage.name / MODEL)
    train(denoiser_stage(pictures), PLAN, tmp_path / "run" / DenoiserStage.name, CPU)
    made = load_run(CONFIG, tmp_path / "run")
    export(made, tmp_path / "out")
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    assert {part.dtype for part in (loaded.unet, loaded.vae, loaded.text_encoder)} == {torch.float32}
    drawn = loaded(["a cat"], num_inference_steps=2, output_type="np").images
    assert drawn.shape == (1, 128, 128, 3)


def test_an_export_needs_finished_stages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train that stage first"):
        load_run(CONFIG, tmp_path)


def test_the_shipped_config_is_readable_and_typos_are_named(tmp_path: Path) -> None:
    assert load_config(HERE / "shipped.toml").denoiser.plan.batch > 0
    (tmp_path / "typo.toml").write_text("[autoencoder]\nchanels = [8]\n[autoencoder.plan]\nbatch = 1\n")
    with pytest.raises(ConfigError, match=r"no setting|lacks a setting"):
        load_config(tmp_path / "typo.toml")


def test_pictures_survive_the_way_to_tensors_and_back(pictures: Pictures) -> None:
    assert reconstruct(small_autoencoder(), pictures.pixels).shape == pictures.pixels.shape
