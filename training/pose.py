"""`python -m training.pose MODEL OUTPUT`: trains a control network by which a drawn head tilts, shifts and blinks.

The network is HelloMeme's of family v2 (arXiv 2410.22901), for a small model. Its model stays as it is: the denoising
error of drawn heads in known poses goes through it, and counts more where the head is.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.scenes.held_out import is_unseen
from benchmarks.scenes.posed import PosedScene, render_posed, sample_posed
from benchmarks.scenes.prompts import describe_scene
from benchmarks.scenes.vocabulary import FULL_VOCABULARY
from fisedit.adapters.hellomeme.drive_networks import DriveNetwork
from fisedit.adapters.hellomeme.pose_picture import draw_pose
from fisedit.adapters.insertion_points import inject_maps, insertion_points
from fisedit.adapters.training.draws import generator_for
from fisedit.values import LATENT_FACTOR
from fisedit.values.drive import EXPRESSIONS, FACE
from training.companions import parse_run
from training.config import Plan
from training.linear import convolve_linears
from training.loop import save_whole, train
from training.pictures import save_sheet, to_bytes, to_tensor

CHANNELS, WIDTH = 32, 128
"""Of the network's first conv, and of its tokens."""

PLANS = {
    "cpu": Plan(batch=12, seconds=1e9, steps=6000, learning_rate=1e-3, warmup=100, average=0.995, report_every=250),
    "cuda": Plan(batch=96, seconds=150, steps=3000, learning_rate=1e-3, warmup=100, average=0.995, report_every=1000),
}
_HEAD_WEIGHT = 3.0  # further weight of errors on the head
_REST, _DROPPED = 0.2, 0.1  # shares of heads at rest, and of pictures without words, pose and expression
_BATCH, _SHOWN = 32, 8


@dataclass(frozen=True)
class PosedLatents:
    """N posed scenes.

    Args:
        means: of the latents, scaled, [N, 4, h, w].
        spreads: of the same shape.
        tokens: [N, 77].
        poses: [N, 6].
        expressions: [N, 51].
        heads: shares of cells that the head covers, [N, h, w].
    """

    means: Tensor
    spreads: Tensor
    tokens: Tensor
    poses: Tensor
    expressions: Tensor
    heads: Tensor

    def __len__(self) -> int:
        return len(self.means)


class PoseStage:
    """A control network that is trained through a frozen model."""

    name = "pose"

    def __init__(self, pipeline: StableDiffusionPipeline, scenes: PosedLatents, batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.pipeline, self.scenes, self.batch, self.seed = pipeline, scenes, batch, seed
        self.device: torch.device = pipeline.unet.device
        self.unet = pipeline.unet.requires_grad_(False).eval()
        self.text_encoder = pipeline.text_encoder.requires_grad_(False).eval()
        self.network = build_network(pipeline)
        self.model: nn.Module = self.network.to(self.device)
        self.kept = pipeline.scheduler.alphas_cumprod.to(self.device)
        self.is_velocity = pipeline.scheduler.config["prediction_type"] == "v_prediction"
        self.no_text = tokens_of(pipeline, [""]).to(self.device)
        if self.device.type == "cpu":
            convolve_linears(self.unet)

    def losses(self, step: int) -> dict[str, Tensor]:
        """The min-SNR weighted error (arXiv 2303.09556) of one batch, and its part on the heads."""
        noise = generator_for(self.seed, step, self.device)
        rows = torch.randint(len(self.scenes), (self.batch,), generator=noise, device=self.device).cpu()
        dropped = torch.rand(self.batch, generator=noise, device=self.device) < _DROPPED
        means, spreads = (each[rows].float().to(self.device) for each in (self.scenes.means, self.scenes.spreads))
        clean = means + spreads * torch.randn(means.shape, generator=noise, device=self.device)
        added = torch.randn(means.shape, generator=noise, device=self.device)
        shares = torch.arange(self.batch, device=self.device) + torch.rand(1, generator=noise, device=self.device)
        steps = (shares / self.batch * len(self.kept)).long().clamp_max(len(self.kept) - 1)
        kept = self.kept[steps][:, None, None, None]
        noised = kept.sqrt() * clean + (1 - kept).sqrt() * added
        with torch.no_grad():
            tokens = torch.where(dropped[:, None], self.no_text, self.scenes.tokens[rows].to(self.device))
            text = self.text_encoder(tokens).last_hidden_state
        maps = self._maps(rows, dropped, means.shape[-1] * LATENT_FACTOR)
        with inject_maps(self.unet, controls=maps):
            guess = self.unet(noised.contiguous(memory_format=torch.channels_last), steps, text).sample
        target = kept.sqrt() * added - (1 - kept).sqrt() * clean if self.is_velocity else added
        ratio = kept / (1 - kept)
        weight = ratio.clamp_max(5) / (ratio + 1 if self.is_velocity else ratio)
        error = weight * (guess.float() - target).square()
        heads = self.scenes.heads[rows].float().to(self.device)[:, None]
        on_heads = (error * heads).mean()
        return {"loss": error.mean() + _HEAD_WEIGHT * on_heads, "heads": on_heads.detach()}

    def _maps(self, rows: Tensor, dropped: Tensor, side: int) -> dict[str, Tensor]:
        poses = [draw_pose(pose, (side, side)) for pose in self.scenes.poses[rows].tolist()]
        pictures = torch.from_numpy(np.stack([np.asarray(pose, np.float32) for pose in poses])).permute(0, 3, 1, 2)
        pictures = (pictures / 127.5 - 1).to(self.device)
        pictures[dropped] = -1
        expressions = self.scenes.expressions[rows].to(self.device) * ~dropped[:, None]
        face = torch.zeros(len(rows), *FACE, device=self.device)
        maps: dict[str, Tensor] = self.model(pictures, expressions, face)
        return maps

    @torch.no_grad()
    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """The sheet shows drawn heads and, below, the model's pictures of the same words and poses."""
        network, own = cast(DriveNetwork, averaged), self.model
        rows, count = torch.arange(_SHOWN), min(_SHOWN, len(self.scenes))
        self.model = network
        side = self.scenes.means.shape[-1] * LATENT_FACTOR
        maps = self._maps(rows[:count], torch.zeros(count, dtype=torch.bool, device=self.device), side)
        without = self._maps(rows[:count], torch.ones(count, dtype=torch.bool, device=self.device), side)
        self.model = own
        text = self.text_encoder(self.scenes.tokens[:count].to(self.device)).last_hidden_state
        empty = self.text_encoder(self.no_text.expand(count, -1)).last_hidden_state
        controls = {point: torch.cat([without[point], maps[point]]) for point in maps}
        self.pipeline.set_progress_bar_config(disable=True)
        with inject_maps(self.unet, controls=controls):
            drawn = self.pipeline(
                prompt_embeds=text,
                negative_prompt_embeds=empty,
                num_inference_steps=20,
                guidance_scale=4.0,
                generator=[generator_for(self.seed, i, torch.device("cpu")) for i in range(count)],
                output_type="np",
            ).images
        scale = float(self.pipeline.vae.config["scaling_factor"])
        truth = self.pipeline.vae.decode(self.scenes.means[:count].float().to(self.device) / scale).sample
        save_sheet(sheet, (to_bytes(truth), np.round(drawn * 255).astype(np.uint8)))
        return {}


def build_network(pipeline: StableDiffusionPipeline) -> DriveNetwork:
    """A network with random weights, whose maps begin as zeros, for every up block of a model's UNet."""
    places, ups = insertion_points(pipeline.unet), len(pipeline.unet.up_blocks)
    points = [f"up_{ups - 1 - i}" for i in range(ups)]
    return DriveNetwork((CHANNELS, *(places[point].channels for point in points)), WIDTH, 4, points=points)


def save_network(network: DriveNetwork, folder: Path) -> None:
    """Writes a network as the published ones are laid out, in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.half().contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"_class_name": "HMV2ControlNet"}, indent=2) + "\n")


def tokens_of(pipeline: StableDiffusionPipeline, prompts: list[str]) -> Tensor:
    """Token rows [N, 77] of prompts."""
    found: Tensor = pipeline.tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
    return found


def sampled(seed: int, count: int, words: tuple[str, ...]) -> Iterator[PosedScene]:
    """Posed scenes, of which some are at rest and none is held out; scene i depends on (seed, i) alone."""
    ground = tuple(word for word in FULL_VOCABULARY.ground if not words or word in words)
    for i in range(count):
        rng = np.random.default_rng((seed, i))
        posed = sample_posed(rng, replace(FULL_VOCABULARY, ground=ground))
        while is_unseen(posed.scene):
            posed = sample_posed(rng, replace(FULL_VOCABULARY, ground=ground))
        yield posed.at_rest if rng.random() < _REST else posed


@torch.no_grad()
def load_or_draw(
    folder: Path, pipeline: StableDiffusionPipeline, seed: int, count: int, words: tuple[str, ...]
) -> PosedLatents:
    """Posed scenes, drawn and encoded, from a file of a folder if they are there."""
    known = [*pipeline.vae.state_dict().values()]
    whole = hashlib.sha256(repr((seed, count, sorted(words), [float(each.double().sum()) for each in known])).encode())
    path = folder / f"{whole.hexdigest()[:16]}.pt"
    if path.is_file():
        return PosedLatents(**torch.load(path, weights_only=True))
    autoencoder: AutoencoderKL = pipeline.vae
    side = int(autoencoder.config["sample_size"])
    scale, parts = float(autoencoder.config["scaling_factor"]), list[tuple[Tensor, ...]]()
    waiting = list[PosedScene]()
    for i, posed in enumerate(sampled(seed, count, words), 1):
        waiting.append(posed)
        if len(waiting) < _BATCH and i < count:
            continue
        drawn = [render_posed(each, side) for each in waiting]
        posterior = autoencoder.encode(to_tensor(np.stack([d for d, _ in drawn]), autoencoder.device)).latent_dist
        heads = torch.from_numpy(np.stack([head for _, head in drawn])).float()[:, None]
        expressions = [each.drive.expression or [0.0] * len(EXPRESSIONS) for each in waiting]
        parts.append(
            (
                (posterior.mean * scale).half().cpu(),
                (posterior.std * scale).half().cpu(),
                tokens_of(pipeline, [describe_scene(each.scene).text for each in waiting]),
                torch.tensor([each.drive.pose for each in waiting]),
                torch.tensor(expressions),
                F.avg_pool2d(heads, LATENT_FACTOR)[:, 0].half(),
            )
        )
        waiting = []
    scenes = PosedLatents(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_whole(vars(scenes), path)
    return scenes


def main() -> None:
    """Trains, or resumes, and writes the network."""
    run = parse_run("training.pose", __doc__, "network", pictures=6000)
    plan, folder, shape = PLANS[run.device.type], run.folder / PoseStage.name, run.config.scenes
    scenes = load_or_draw(folder / "scenes", run.pipeline, shape.seed, run.pictures, shape.objects)
    averaged = train(PoseStage(run.pipeline, scenes, plan.batch, run.config.seed), plan, folder, run.device)
    save_network(cast(DriveNetwork, averaged), run.output)


if __name__ == "__main__":
    main()
