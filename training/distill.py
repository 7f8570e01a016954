"""`python -m training.distill MODEL OUTPUT`: trains a LoRA by which a model paints in four steps, without guidance.

Consistency distillation with the guidance built in (arXiv 2310.04378), as a LoRA (arXiv 2311.05556): what the student
makes of noised latents at a step is what it makes of those that the guided teacher's DDIM step leads to. Knows nothing
of drawing.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from diffusers import LCMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from fisedit.adapters.lora import SuggestedSampling
from fisedit.adapters.training.draws import generator_for
from fisedit.values import SchedulerName
from training.companions import parse_run
from training.config import Plan
from training.denoiser import SHOWN
from training.latents import LatentScenes, load_or_encode
from training.loop import train
from training.models import build_scheduler
from training.pictures import save_sheet
from training.tokens import encode

GUIDANCE, STEPS = 4.0, 4
RANK = 32
PLANS = {
    "cpu": Plan(batch=12, seconds=1e9, steps=400, learning_rate=4e-4, warmup=30, average=0.98, report_every=100),
    "cuda": Plan(batch=48, seconds=70, steps=1200, learning_rate=4e-4, warmup=50, average=0.99, report_every=400),
}
GRID = 50
"""Steps of the schedule that the student is taught on, LCMScheduler's own."""

SKIPPED = 4
"""Of these steps the teacher takes so many at once: what is known of clean latents comes to noise in few links."""

_TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"),
    *("conv1", "conv2", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv", "time_emb_proj"),
)
_SIGMA, _TIMESTEP_SCALE, _HUBER = 0.5, 10.0, 1e-3


class DistilledStage:
    """A UNet whose LoRA alone is trained.

    Args:
        pipeline: the teacher.
        scenes: whose latents are noised.
        batch: of a step.
        seed: of all draws.
    """

    name = "distilled"

    def __init__(self, pipeline: StableDiffusionPipeline, scenes: LatentScenes, batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.device: torch.device = pipeline.unet.device
        self.pipeline, self.scenes, self.batch, self.seed = pipeline, scenes.to(self.device), batch, seed
        self.teacher = pipeline.unet.requires_grad_(False).eval()
        self.text_encoder = pipeline.text_encoder.requires_grad_(False).eval()
        student = deepcopy(self.teacher)
        student.add_adapter(
            LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(_TARGETS), init_lora_weights="gaussian")
        )
        self.model: nn.Module = student
        prediction = str(pipeline.scheduler.config["prediction_type"])
        self.is_velocity = prediction == "v_prediction"
        self.kept = build_scheduler(prediction).alphas_cumprod.to(self.device)
        with torch.no_grad():
            self.no_text = self.text_encoder(torch.tensor(encode([""]), device=self.device)).last_hidden_state

    def losses(self, step: int) -> dict[str, Tensor]:
        """The distance of the student's clean latents at two neighbouring steps; steps spread evenly over the batch."""
        noise, batch, device = generator_for(self.seed, step, self.device), self.batch, self.device
        scenes = self.scenes.pick(torch.randint(len(self.scenes), (batch,), generator=noise, device=device))
        clean = scenes.means + scenes.spreads * torch.randn(scenes.means.shape, generator=noise, device=device)
        added = torch.randn(clean.shape, generator=noise, device=device)
        shares = (torch.arange(batch, device=device) + torch.rand(1, generator=noise, device=device)) / batch
        stride = len(self.kept) // GRID
        timesteps = ((shares * GRID).long().clamp_max(GRID - 1) + 1) * stride - 1
        earlier = timesteps - SKIPPED * stride
        kept = self._kept(timesteps)
        kept_earlier = torch.where((earlier < 0)[:, None, None, None], 1.0, self._kept(earlier))
        noised = kept.sqrt() * clean + (1 - kept).sqrt() * added
        with torch.no_grad():
            text = self.text_encoder(scenes.tokens).last_hidden_state
            both = torch.cat([self.no_text.expand_as(text), text])
            guess = self.teacher(torch.cat([noised, noised]), torch.cat([timesteps, timesteps]), both).sample
            plain, told = guess.chunk(2)
            original, direction = self._split(noised, plain + GUIDANCE * (told - plain), kept)
            led = kept_earlier.sqrt() * original + (1 - kept_earlier).sqrt() * direction
            target = self.consistent(self.model, led, earlier, text)
        found = self.consistent(self.model, noised, timesteps, text)
        distance = (found - target) / (1 - kept).sqrt()  # of velocities: latents hardly tell near the clean end
        return {"loss": (distance.square() + _HUBER**2).sqrt().mean() - _HUBER}

    def consistent(self, model: Any, latents: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """A model's clean latents, with LCMScheduler's boundary: at the last step the latents themselves."""
        inside = timesteps.clamp_min(0)
        guess = model(latents.contiguous(memory_format=torch.channels_last), inside, text).sample
        original, _ = self._split(latents, guess, self._kept(timesteps))
        scaled = (inside.float() * _TIMESTEP_SCALE)[:, None, None, None]
        skip, out = _SIGMA**2 / (scaled**2 + _SIGMA**2), scaled / (scaled**2 + _SIGMA**2).sqrt()
        is_last = (timesteps < 0)[:, None, None, None]
        return torch.where(is_last, latents, skip * latents + out * original)

    def _kept(self, timesteps: Tensor) -> Tensor:
        kept: Tensor = self.kept[timesteps.clamp_min(0)][:, None, None, None]
        return kept

    def _split(self, latents: Tensor, guess: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Clean latents and noise by a prediction."""
        if self.is_velocity:
            return kept.sqrt() * latents - (1 - kept).sqrt() * guess, kept.sqrt() * guess + (1 - kept).sqrt() * latents
        return (latents - (1 - kept).sqrt() * guess) / kept.sqrt(), guess

    @torch.no_grad()
    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """The sheet shows SHOWN in four steps from fixed seeds; nothing else is measured."""
        parts = self.pipeline.components | {
            "unet": averaged,
            "scheduler": LCMScheduler.from_config(self.pipeline.scheduler.config),
        }
        pipeline = StableDiffusionPipeline(**parts, requires_safety_checker=False)
        pipeline.set_progress_bar_config(disable=True)
        seeds = [generator_for(self.seed, index, torch.device("cpu")) for index in range(len(SHOWN))]
        drawn = pipeline(list(SHOWN), num_inference_steps=STEPS, guidance_scale=1.0, generator=seeds, output_type="np")
        pictures = np.round(drawn.images * 255).astype(np.uint8)
        save_sheet(sheet, (pictures[:4], pictures[4:]))
        return {}


def save_lora(unet: UNet2DConditionModel, folder: Path) -> None:
    """Writes a UNet's LoRA as diffusers' own file, in half precision; its metadata suggest how it is sampled."""
    layers = get_peft_model_state_dict(unet)
    sampling = SuggestedSampling(SchedulerName.LCM, STEPS, 1.0)
    metadata = {"format": "pt"} | {name: str(value) for name, value in vars(sampling).items()}
    StableDiffusionPipeline.save_lora_weights(
        folder,
        {name: weight.half() for name, weight in layers.items()},
        save_function=lambda weights, path: save_file(weights, path, metadata),
    )


def main() -> None:
    """Trains, or resumes, and writes the LoRA."""
    run = parse_run("training.distill", __doc__, "LoRA", pictures=4000)
    plan, folder, shape = PLANS[run.device.type], run.folder / DistilledStage.name, run.config.scenes
    scenes = load_or_encode(folder / "scenes", run.pipeline.vae, shape.seed, run.pictures, False, shape.objects)
    averaged = train(DistilledStage(run.pipeline, scenes, plan.batch, run.config.seed), plan, folder, run.device)
    save_lora(cast(UNet2DConditionModel, averaged), run.output)


if __name__ == "__main__":
    main()
