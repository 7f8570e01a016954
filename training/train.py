"""`python -m training.train STAGE`: trains one stage of the demo model, or resumes it."""

import argparse
import sys
from pathlib import Path
from typing import cast

import torch
from diffusers import AutoencoderKL

from fisedit.evaluation.scenes.drawing import FontMissing
from training.autoencoder import AutoencoderStage, DecoderStage
from training.config import Config, ConfigError, load_config
from training.denoiser import DenoiserStage
from training.latents import load_or_encode, normalise_latents
from training.loop import train
from training.pictures import Pictures, draw_pictures, to_tensor

HERE = Path(__file__).parent
MODEL = "model"
_MEASURED = 256


def main() -> int:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("stage", choices=sorted(STAGES))
    parser.add_argument("--config", type=Path, default=HERE / "demo.toml")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="checkpoints, logs and sample sheets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads to use")
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    try:
        STAGES[chosen.stage](load_config(chosen.config), chosen.folder, torch.device(chosen.device))
    except (ConfigError, FontMissing) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def training_pictures(config: Config) -> Pictures:
    """The scenes that the autoencoder sees."""
    return draw_pictures(config.scenes.seed, config.scenes.count, config.scenes.side)


def held_out_pictures(config: Config) -> Pictures:
    """Scenes that no stage trains on."""
    return draw_pictures(config.scenes.held_out_seed, config.scenes.held_out, config.scenes.side)


def train_autoencoder(config: Config, folder: Path, device: torch.device) -> None:
    """Encoder and decoder, from nothing; the latents are normalised at the end."""
    pictures, held_out = training_pictures(config), held_out_pictures(config)
    stage = AutoencoderStage(config, pictures, held_out, device)
    averaged = cast(AutoencoderKL, train(stage, config.autoencoder.plan, folder / stage.name, device))
    normalise_latents(averaged, to_tensor(pictures.pixels[:_MEASURED]).to(device))
    averaged.save_pretrained(folder / stage.name / MODEL)


def train_denoiser(config: Config, folder: Path, device: torch.device) -> None:
    """Text encoder and UNet, on the autoencoder's latents: close-ups first, then whole scenes."""
    autoencoder = load_autoencoder(folder / AutoencoderStage.name, device)
    shape, known = config.scenes, None
    stages = (("closeups", True, config.closeups.pictures, config.closeups.plan),
              (DenoiserStage.name, False, config.denoiser.pictures, config.denoiser.plan))  # fmt: skip
    for name, close, count, plan in stages:
        kept = folder / name
        kept.mkdir(parents=True, exist_ok=True)
        scenes = load_or_encode(kept / "scenes.pt", autoencoder, shape.seed, count, close)
        held_out = load_or_encode(kept / "held-out.pt", autoencoder, shape.held_out_seed, shape.held_out, close)
        stage = DenoiserStage(config, plan, autoencoder, scenes, held_out, device)
        if known is not None:
            stage.model.load_state_dict(known.state_dict())
        known = train(stage, plan, kept, device)


def train_decoder(config: Config, folder: Path, device: torch.device) -> None:
    """The decoder once more."""
    autoencoder = load_autoencoder(folder / AutoencoderStage.name, device)
    stage = DecoderStage(config, autoencoder, training_pictures(config), held_out_pictures(config), device)
    averaged = cast(AutoencoderKL, train(stage, config.decoder.plan, folder / stage.name, device))
    averaged.save_pretrained(folder / stage.name / MODEL)


def load_autoencoder(folder: Path, device: torch.device) -> AutoencoderKL:
    """The autoencoder that a stage left in `folder`.

    Raises:
        ConfigError: that stage has not finished.
    """
    if not (folder / MODEL).is_dir():
        raise ConfigError(f"a finished {folder.name} stage is needed, found none in {folder}: train that stage first")
    model = AutoencoderKL.from_pretrained(folder / MODEL)
    return cast(AutoencoderKL, model.to(device=device, memory_format=torch.channels_last))


def train_all(config: Config, folder: Path, device: torch.device) -> None:
    """The three stages, one after the other."""
    for stage in (train_autoencoder, train_denoiser, train_decoder):
        stage(config, folder, device)


STAGES = {
    "all": train_all,
    "autoencoder": train_autoencoder,
    "denoiser": train_denoiser,
    "decoder": train_decoder,
}

if __name__ == "__main__":
    raise SystemExit(main())
