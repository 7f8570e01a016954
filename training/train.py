"""`python -m training.train STAGE`: trains one stage of the demo model, or resumes it."""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import cast

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from benchmarks.scenes.drawing import FontMissing
from training.autoencoder import AutoencoderStage, DecoderStage, held_out_pictures, training_pictures
from training.config import Config, ConfigError, Plan, load_config
from training.denoiser import DenoiserStage
from training.latents import draw_scenes, load_or_encode, normalise_latents
from training.loop import save_whole, train
from training.pictures import draw_pictures, to_tensor
from training.quick import prepare_cpu

HERE = Path(__file__).parent
MODEL = "model"
CLOSEUPS = "closeups"
_MEASURED = 256
_MOST_WAITED = 60.0  # seconds beyond the autoencoder's own


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
        config = load_config(chosen.config)
        prepare_cpu(config.products)
        torch.backends.cudnn.benchmark = True
        STAGES[chosen.stage](config, chosen.folder, torch.device(chosen.device))
    except (ConfigError, FontMissing) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def train_autoencoder(config: Config, folder: Path, device: torch.device) -> None:
    """Encoder and decoder; the latents are normalised at the end."""
    if (folder / AutoencoderStage.name / MODEL).is_dir():
        return
    stage = AutoencoderStage(config, training_pictures(config), held_out_pictures(config), device)
    averaged = cast(AutoencoderKL, train(stage, config.autoencoder.plan, folder / stage.name, device))
    shape = config.scenes
    measured = draw_pictures(shape.seed, _MEASURED, shape.side, shape.objects).pixels
    normalise_latents(averaged, to_tensor(measured, device))
    _save_whole_model(averaged, folder / stage.name / MODEL)


def train_denoiser(config: Config, folder: Path, device: torch.device) -> None:
    """Text encoder and UNet, on the autoencoder's latents: close-ups first, then whole scenes."""
    autoencoder = load_autoencoder(folder / AutoencoderStage.name, device)
    shape = config.scenes
    known: dict[str, Tensor] | None = None
    for name, close, count, plan in _denoiser_stages(config):
        kept = folder / name
        trained = kept / "averaged.pt"
        if not trained.is_file():
            scenes = load_or_encode(kept / "scenes", autoencoder, shape.seed, count, close, shape.objects)
            held_out = load_or_encode(
                kept / "held-out", autoencoder, shape.held_out_seed, shape.held_out, close, shape.objects
            )
            stage = DenoiserStage(config, plan, autoencoder, scenes, held_out, device)
            if known is not None:
                stage.model.load_state_dict(known)
            save_whole(train(stage, plan, kept, device).state_dict(), trained)
        known = torch.load(trained, map_location=device, weights_only=True)


def encode_all_scenes(config: Config, folder: Path, device: torch.device) -> None:
    """The scenes of the denoiser's two stages, drawn by all cores while the autoencoder trains in another process."""
    shape, cores = config.scenes, len(os.sched_getaffinity(0))
    stages = _denoiser_stages(config)
    drawn = [list(draw_scenes(shape.seed, count, close, shape.objects, workers=cores)) for _, close, count, _ in stages]
    waited = time.monotonic()
    while not (folder / AutoencoderStage.name / MODEL).is_dir():
        if time.monotonic() - waited > config.autoencoder.plan.seconds + _MOST_WAITED:
            raise ConfigError(f"the autoencoder's stage did not end in {folder}: train that stage first")
        time.sleep(0.2)
    autoencoder = load_autoencoder(folder / AutoencoderStage.name, device)
    for (name, close, count, _), scenes in zip(stages, drawn, strict=True):
        load_or_encode(folder / name / "scenes", autoencoder, shape.seed, count, close, shape.objects, scenes)


def _denoiser_stages(config: Config) -> list[tuple[str, bool, int, Plan]]:
    """Name, whether of close-ups, number of scenes, plan; close-ups of no scenes are left out."""
    stages = [
        (CLOSEUPS, True, config.closeups.pictures, config.closeups.plan),
        (DenoiserStage.name, False, config.denoiser.pictures, config.denoiser.plan),
    ]
    return [stage for stage in stages if stage[2]]


def train_decoder(config: Config, folder: Path, device: torch.device) -> None:
    """The decoder once more."""
    if (folder / DecoderStage.name / MODEL).is_dir():
        return
    autoencoder = load_autoencoder(folder / AutoencoderStage.name, device)
    stage = DecoderStage(config, autoencoder, training_pictures(config), held_out_pictures(config), device)
    averaged = cast(AutoencoderKL, train(stage, config.decoder.plan, folder / stage.name, device))
    _save_whole_model(averaged, folder / stage.name / MODEL)


def _save_whole_model(model: AutoencoderKL, folder: Path) -> None:
    """Saves to a folder that is there only when all of it is."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    partial.replace(folder)


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
    "scenes": encode_all_scenes,
    "denoiser": train_denoiser,
    "decoder": train_decoder,
}

if __name__ == "__main__":
    raise SystemExit(main())
