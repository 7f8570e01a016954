"""One training loop for every stage: schedule, averaging, checkpoints, log. Knows nothing of what is trained.

Every random draw of step n comes from generators seeded by (seed, n), so a resumed run needs no saved generator and
repeats the uninterrupted one exactly.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from fisedit.adapters.training.log import append_row, truncate_after
from training.config import Plan

_CLIP = 1.0
_MOST_SKIPPED = 20


class Stage(Protocol):
    """What the loop needs to know of a stage."""

    name: str
    model: nn.Module

    def losses(self, step: int) -> dict[str, Tensor]:
        """The losses of one batch; `loss` is the one to descend."""

    def report(self, averaged: nn.Module, sheet: Path) -> dict[str, float]:
        """Measures the averaged model on held-out scenes and draws a sample sheet."""


@dataclass
class Progress:
    """Where a run stands, and the step of its last report."""

    step: int = 0
    seconds: float = 0.0
    reported: int = -1


def train(stage: Stage, plan: Plan, folder: Path, device: torch.device) -> nn.Module:
    """Trains a stage to the end of its budget, resuming from `folder` when it holds a checkpoint.

    Returns:
        The averaged model. `folder` receives checkpoint.pt, log.csv and a sample sheet at every report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = _Run(stage, plan, folder, device)
    run.resume()
    while run.share_done() < 1:
        run.step()
    if run.progress.reported != run.progress.step:
        run.report()
        run.save()
    return run.averaged.module


class _Run:
    """The state of one training run."""

    def __init__(self, stage: Stage, plan: Plan, folder: Path, device: torch.device) -> None:
        self.stage, self.plan, self.folder, self.device = stage, plan, folder, device
        self.trained = [weight for weight in stage.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0, weight_decay=plan.weight_decay, fused=True)
        self.averaged = AveragedModel(stage.model, multi_avg_fn=_averaging(plan.average))
        self.progress = Progress()
        self.started = time.monotonic()
        self.skipped = 0  # batches in a row whose gradients are no numbers: on a GPU in bf16 there was one in seventy
        self.since: list[dict[str, Tensor]] = []  # the losses since the log's last line

    def share_done(self) -> float:
        """How much of the budget is spent, 0 to 1 and beyond."""
        spent = self.progress.seconds + time.monotonic() - self.started
        return max(self.progress.step / self.plan.steps, spent / self.plan.seconds)

    def step(self) -> None:
        """One batch: descend, average, and now and then log and save."""
        rate = self._set_rate()
        autocast = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with autocast:
            losses = self.stage.losses(self.progress.step)
        self.optimizer.zero_grad()
        losses["loss"].backward()
        norm = nn.utils.clip_grad_norm_(self.trained, _CLIP)
        self.skipped = 0 if norm.isfinite() else self.skipped + 1
        if self.skipped > _MOST_SKIPPED:
            self.save()
            raise FloatingPointError(f"{self.skipped} batches in a row had gradients that are no numbers")
        if not self.skipped:
            self.optimizer.step()
        self.averaged.update_parameters(self.stage.model)
        self.progress.step += 1
        self.since.append({name: value.detach() for name, value in losses.items()})
        if self.progress.step % self.plan.log_every == 0:
            means = {name: float(torch.stack([row[name] for row in self.since]).mean()) for name in self.since[0]}
            self._log(means | {"rate": rate, "norm": float(norm)})
            self.since.clear()
        if self.progress.step % self.plan.report_every == 0:
            self.report()
            self.save()
        elif time.monotonic() - self.started >= self.plan.save_seconds:
            self.save()

    def _set_rate(self) -> float:
        warm = min(1.0, (self.progress.step + 1) / self.plan.warmup)
        rate = self.plan.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, self.share_done())))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _log(self, row: dict[str, float]) -> None:
        spent = self.progress.seconds + time.monotonic() - self.started
        append_row(self.folder / "log.csv", {"step": self.progress.step, "seconds": round(spent, 1)} | row)

    def report(self) -> None:
        """Measures the averaged model."""
        step = self.progress.step
        found = self.stage.report(self.averaged.module, self.folder / f"sheet-{step:06d}.png")
        spent = self.progress.seconds + time.monotonic() - self.started
        append_row(self.folder / "report.csv", {"step": step, "seconds": round(spent, 1)} | found)
        self.progress.reported = step

    def save(self) -> None:
        """Writes everything that resuming needs; never half a file."""
        now = time.monotonic()
        self.progress.seconds, self.started = self.progress.seconds + now - self.started, now
        state = {
            "model": self.stage.model.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
        }
        save_whole(state, self.folder / "checkpoint.pt")

    def resume(self) -> None:
        """Takes up a saved run, if there is one."""
        path = self.folder / "checkpoint.pt"
        if not path.is_file():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.stage.model.load_state_dict(state["model"])
        self.averaged.load_state_dict(state["averaged"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        for table in ("log.csv", "report.csv"):
            truncate_after(self.folder / table, self.progress.step)


def _averaging(most: float) -> Callable[[Any, Any, Tensor | int], None]:
    """A moving average that forgets fast at first, or it would hold the untrained weights for thousands of steps."""

    @torch.no_grad()
    def average(averaged: Any, current: Any, count: Tensor | int) -> None:
        kept = min(most, (1 + int(count)) / (10 + int(count)))
        torch._foreach_lerp_(list(averaged), list(current), 1 - kept)

    return average


def save_whole(state: object, path: Path) -> None:
    """Saves to a file that is either the old one or the whole new one, even after a power cut."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
