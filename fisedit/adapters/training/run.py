"""One training run of a reference adapter: accelerate's loop, checkpoints, log and sample sheets.

    OUTPUT/adapter/           the averaged weights, as `load_adapter` reads them
    OUTPUT/checkpoint.pt      all that resuming needs; a run with the same output continues from it
    OUTPUT/log.csv, report.csv, sheet-NNNNNN.png

Every file is whole or absent, whenever the run is killed. Knows no command line.
"""

from __future__ import annotations

import copy
import io
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel

from fisedit.adapters.row_column.checkpoints import check_fit, fresh_adapter, load_adapter, save_adapter
from fisedit.adapters.training.denoising import ConditionedUNet, denoising_loss
from fisedit.adapters.training.draws import draw_rows, generator_for
from fisedit.adapters.training.examples import TrainingExamples
from fisedit.adapters.training.log import append_row, truncate_after
from fisedit.adapters.training.samples import SampleSheets
from fisedit.errors import InputError, NumericsError
from fisedit.machine.device import choose_device
from fisedit.models.loader import load
from fisedit.storage import files, images
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from fisedit.adapters.row_column.attention import RowColumnAdapter
    from fisedit.adapters.training.training_settings import TrainingSettings
    from fisedit.adapters.training.triples import Triple
    from fisedit.machine.model import Model
    from fisedit.values import OnStep

CHECKPOINT, ADAPTER, LOG, REPORT = "checkpoint.pt", "adapter", "log.csv", "report.csv"
_CLIP = 1.0


def train_adapter(
    triples: tuple[Triple, ...],
    output: Path,
    settings: TrainingSettings,
    *,
    device: str | None = None,
    local_files_only: bool = False,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Train an adapter on triples, or resume the run in `output`.

    Args:
        triples: from `read_triples`.
        output: folder of the run.
        settings: The settings of the run.
        device: "cpu" for a CPU; None, or "cuda", for accelerate's choice.
        local_files_only: never use the network.
        on_step: called after every step of the first process.

    Returns:
        Where the adapter is, the step reached, its size, and the last losses; nothing in processes but the first.

    Raises:
        InputError: a picture or control cannot be read, the device is not here or not accelerate's first, or `output`
            holds a run of other settings.
        ModelError: the base, or the adapter to start from, cannot be loaded.
        NumericsError: the loss is no number.
    """
    chosen = choose_device(device)
    if chosen.index:
        raise InputError(f"device must be cpu or cuda, got {chosen}; choose a GPU by CUDA_VISIBLE_DEVICES")
    output.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=settings.accumulate,
        cpu=device is not None and chosen.type == "cpu",
    )
    pipe = load(settings.model, device=accelerator.device, dtype="fp32", local_files_only=local_files_only)
    run = TrainingRun(pipe, triples, output, settings, accelerator, local_files_only=local_files_only)
    run.resume()
    while run.step < settings.steps:
        run.advance()
        if on_step and accelerator.is_main_process:
            on_step(run.step, settings.steps, None)
    return run.summary() if accelerator.is_main_process else {}


class TrainingRun:
    """The state of a run.

    Args:
        pipe: the base, frozen here.
        triples: The triples; the last `settings.held_out` of them are kept from training.
        output: folder of the run.
        settings: The settings of the run.
        accelerator: The accelerator of this process.
        local_files_only: never use the network.
    """

    def __init__(
        self,
        pipe: Model,
        triples: tuple[Triple, ...],
        output: Path,
        settings: TrainingSettings,
        accelerator: Accelerator,
        *,
        local_files_only: bool = False,
    ) -> None:
        self.settings, self.output, self.accelerator = settings, output, accelerator
        side = settings.size or int(pipe.unet.config.sample_size) * LATENT_FACTOR
        last = len(triples) - settings.held_out
        self.samples = SampleSheets(pipe, TrainingExamples(pipe, triples[last:] or triples[:4], side))
        for part in (pipe.unet, pipe.vae, pipe.text_encoder):
            part.requires_grad_(False).eval()
        if settings.gradient_checkpointing:
            pipe.unet.enable_gradient_checkpointing()
        self.scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
        adapter = _initial_adapter(pipe, settings, local_files_only=local_files_only).to(accelerator.device)
        model = ConditionedUNet(pipe.unet, adapter)
        self.examples = TrainingExamples(pipe, triples[:last], side, model.read_maps if settings.keep_maps else None)
        self.ema_adapter = copy.deepcopy(adapter).eval().requires_grad_(False)
        self.ema = EMAModel(adapter.parameters(), decay=settings.ema, foreach=True)
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self.rates = get_cosine_schedule_with_warmup(optimizer, settings.warmup, settings.steps)
        self.adapter = adapter
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.step, self.seconds, self.started = 0, 0.0, time.monotonic()
        self.losses: dict[str, float] = {}

    def advance(self) -> None:
        """Update the weights once; log and save where a step is due."""
        loss = torch.zeros((), device=self.accelerator.device)
        for part in range(self.settings.accumulate):
            with self.accelerator.accumulate(self.model):
                found = self._loss(self.step * self.settings.accumulate + part)
                self.accelerator.backward(found)
                loss += found.detach() / self.settings.accumulate
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), _CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()
        rate = self.rates.get_last_lr()[0]
        self.rates.step()
        self.ema.step(self.adapter.parameters())
        self.step += 1
        saving = self.step % self.settings.save_every == 0 or self.step == self.settings.steps
        if saving or self.step % self.settings.log_every == 0:
            self._log(float(self.accelerator.reduce(loss, "mean")), rate, float(norm))
        if saving and self.accelerator.is_main_process:
            self.save()
        if saving:
            self.accelerator.wait_for_everyone()

    def save(self) -> None:
        """Measure and draw the held-out triples with the averaged weights, then write the checkpoint."""
        self.ema.copy_to(self.ema_adapter.parameters())
        sheet, held_out = self.samples.report(self.ema_adapter, self.scheduler, self.settings)
        self.losses["held_out"] = held_out
        images.write_image(sheet, self.output / f"sheet-{self.step:06d}.png")
        append_row(self.output / REPORT, {"step": self.step, "seconds": self._elapsed(), "held_out": held_out})
        save_adapter(self.ema_adapter, self.output / ADAPTER)
        scaler = self.accelerator.scaler
        state = {
            "settings": self.settings.resume_settings(),
            "step": self.step,
            "seconds": self._elapsed(),
            "adapter": self.adapter.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rates": self.rates.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
            "losses": self.losses,
        }
        whole = io.BytesIO()
        torch.save(state, whole)
        files.write_bytes(whole.getvalue(), self.output / CHECKPOINT)

    def resume(self) -> None:
        """Continue the run in `output`, if there is one.

        Raises:
            InputError: it was made with other settings.
        """
        path = self.output / CHECKPOINT
        if not path.is_file():
            return
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        for name, value in self.settings.resume_settings().items():
            if state["settings"].get(name) != value:
                was = state["settings"].get(name)
                raise InputError(
                    f"{self.output} holds a run with {name} {was}, got {value}; give that, or another output"
                )
        self.adapter.load_state_dict(state["adapter"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rates.load_state_dict(state["rates"])
        if self.accelerator.scaler and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]
        self.started = time.monotonic()
        if self.accelerator.is_main_process:
            for name in (LOG, REPORT):
                truncate_after(self.output / name, self.step)

    def summary(self) -> dict[str, Any]:
        """The result of `train_adapter`."""
        parameters = sum(weights.numel() for weights in self.adapter.parameters())
        described = {"adapter": self.output / ADAPTER, "steps": self.step, "parameters": parameters}
        return described | {"seconds": round(self._elapsed(), 1)} | self.losses

    def _loss(self, micro_step: int) -> torch.Tensor:
        """The loss of this process's batch in a pass of the run."""
        settings, accelerator = self.settings, self.accelerator
        index = micro_step * accelerator.num_processes + accelerator.process_index
        rows = draw_rows(settings.seed, len(self.examples), index * settings.batch, settings.batch)
        noise = generator_for(settings.seed, index, accelerator.device)
        batch = self.examples.batch(rows)
        return denoising_loss(self.model, self.scheduler, batch, self.examples.empty_prompt, settings, noise)

    def _log(self, loss: float, rate: float, norm: float) -> None:
        if not math.isfinite(loss):
            raise NumericsError(
                f"the loss is no number at step {self.step}; lower learning_rate, or train in fp32 or bf16"
            )
        self.losses["loss"] = loss
        if self.accelerator.is_main_process:
            row = {"step": self.step, "seconds": self._elapsed(), "loss": loss, "rate": rate, "norm": norm}
            append_row(self.output / LOG, row)

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started


def _initial_adapter(pipe: Model, settings: TrainingSettings, *, local_files_only: bool) -> RowColumnAdapter:
    """The adapter to train, in fp32: that of `start`, or a fresh one."""
    if settings.start:
        adapter = load_adapter(settings.start, local_files_only=local_files_only)
        check_fit(adapter, pipe.unet)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            adapter = fresh_adapter(pipe.unet, settings.family, settings.heads)
    return adapter.float().train().requires_grad_(True)
