"""The settings of an adapter's training, as one frozen value that is checked when it is made. Knows no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from fisedit.errors import InputError, as_text
from fisedit.values import LATENT_FACTOR, are_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

PRECISIONS = ("no", "bf16", "fp16")

_CHANGEABLE = {"steps", "mixed_precision", "gradient_checkpointing", "keep_maps", "log_every", "save_every"}
"""Settings that may differ when a run is resumed: its length, speed and reports, not what is learnt."""


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of an adapter's training.

    Args:
        model: the base model.
        family: The family of a fresh adapter.
        heads: The number of heads of a fresh adapter's attention.
        start: an adapter to continue from; "" for a fresh one.
        size: side of the square pictures in pixels; 0 for the model's own.
        steps: updates of the weights.
        batch: pictures of one pass, per process.
        accumulate: passes of one update.
        learning_rate: its maximum, after `warmup` steps; a cosine brings it to 0 at the last step.
        warmup: steps.
        region_weight: weight of errors within a triple's region; those outside have 1.
        dropout: share of pictures without prompt and reference, as in guidance's unconditional branch.
        snr_cap: The cap of min-SNR weights (Hang et al., arXiv 2303.09556); 0 weighs all noise levels alike.
        ema: decay of the average of the weights, which is what is saved and sampled.
        seed: The seed of all randomness.
        held_out: the last triples, which are measured and drawn, and never trained on.
        log_every: steps between lines of the log.
        save_every: steps between checkpoints with a sample sheet.
        mixed_precision: one of `PRECISIONS`.
        gradient_checkpointing: recompute the UNet's activations in the backward pass.
        keep_maps: cache the base's maps of a reference, which saves its pass.

    Raises:
        InputError: a value is out of range.
    """

    model: str = "demo"
    family: str = "v5b"
    heads: int = 8
    start: str = ""
    size: int = 0
    steps: int = 10_000
    batch: int = 4
    accumulate: int = 1
    learning_rate: float = 1e-4
    warmup: int = 100
    region_weight: float = 1.0
    dropout: float = 0.1
    snr_cap: float = 5.0
    ema: float = 0.999
    seed: int = 0
    held_out: int = 4
    log_every: int = 50
    save_every: int = 500
    mixed_precision: str = "no"
    gradient_checkpointing: bool = False
    keep_maps: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "steps", "batch", "accumulate", "log_every", "save_every"):
            _check(name, getattr(self, name), at_least=1)
        for name in ("size", "warmup", "seed", "snr_cap", "held_out", "region_weight"):
            _check(name, getattr(self, name), at_least=0)
        if not are_numbers((self.learning_rate,), 1) or self.learning_rate <= 0:
            raise InputError(f"learning_rate must be above 0, got {self.learning_rate}; 1e-4 is a good start")
        for name in ("dropout", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.size % LATENT_FACTOR:
            raise InputError(f"size must be a multiple of {LATENT_FACTOR} pixels, got {self.size}")
        if self.mixed_precision not in PRECISIONS:
            raise InputError(f"mixed_precision must be one of {', '.join(PRECISIONS)}, got {self.mixed_precision!r}")

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> TrainingSettings:
        """The settings among values by name."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def resume_settings(self) -> dict[str, Any]:
        """The settings that must not differ when a run is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in _CHANGEABLE}


def _check(name: str, value: float, *, at_least: int) -> None:
    if not are_numbers((value,), 1) or value < at_least:
        raise InputError(f"{name} must be at least {at_least}, got {as_text(value)}")
