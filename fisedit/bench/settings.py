"""Settings of the evaluations: frozen values without torch, so that the command line can build them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Model, sampling and number of edits of an evaluation.

    Args:
        model: name, folder or file, as in `fisedit.models.loader.load`.
        edits: number of edits; of a dataset the first ones.
        num_inference_steps: denoising steps of every source and edit.
        guidance_scale: The scale of classifier-free guidance; 4 suits the demo model.
        seed: from which the edits are sampled.
        device: The device as torch names it; None for the best one.
        dtype: fp32, bf16 or fp16; None for the device's best.
        local_files_only: never download.
    """

    model: str = "demo"
    edits: int = 120
    num_inference_steps: int = 25
    guidance_scale: float = 4.0
    seed: int = 0
    device: str | None = None
    dtype: str | None = None
    local_files_only: bool = False


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """Settings of `bench edit`, and of the studies that time steps and edits.

    Args:
        model: The model that `fisedit.models.loader.load` takes; None for SD 1.5's architecture with random weights,
            "sdxl" for Stable Diffusion XL's.
        areas: shares of the picture that the masks cover, each in (0, 1].
        size: side of the square picture, in pixels.
        num_inference_steps: The steps of whole edits, and of the source whose middle step is timed. With captured
            graphs edits of two and a half times as many are timed as well.
        guidance_scale: The scale of classifier-free guidance; 1 runs one branch.
        scheduler: a `SchedulerName`.
        repeats: turns, of which the median and the range count.
        baseline: also time plain diffusers: float32, contiguous, eager.
        compiled: whether the search for the fastest dense run tries torch.compile, which takes minutes.
        profile: whether a source and an edit of every mask run once more at the end, with their layers timed.
        device: The device as torch names it; None for the best one.
        dtype: fp32, bf16 or fp16; None for the device's best.
        local_files_only: never download.
    """

    model: str | None = None
    areas: tuple[float, ...] = (0.01, 0.05, 0.15, 0.25, 0.5, 0.8)
    size: int = 512
    num_inference_steps: int = 20
    guidance_scale: float = 7.5
    scheduler: str = "ddim"
    repeats: int = 5
    baseline: bool = True
    compiled: bool = True
    profile: bool = False
    device: str | None = None
    dtype: str | None = None
    local_files_only: bool = False


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(EvaluationSettings):
    """Settings of `fisedit validate`.

    Args:
        size: side of the pictures in pixels; None for the model's own.
        quick: a third of the edits, and one turn of the timings.
        compiled: whether diffusers is timed under torch.compile as well.
    """

    num_inference_steps: int = 25
    guidance_scale: float = 7.5
    size: int | None = None
    quick: bool = False
    compiled: bool = True

    @property
    def repeats(self) -> int:
        """Turns of the timings."""
        return 1 if self.quick else 3
