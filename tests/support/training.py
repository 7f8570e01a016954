"""A short training of an adapter."""

from __future__ import annotations

from fisedit.adapters.training.training_settings import TrainingSettings

SIDE = 64
SETTINGS = TrainingSettings(
    family="v5",
    heads=4,
    size=SIDE,
    steps=4,
    batch=2,
    learning_rate=1e-2,
    warmup=1,
    held_out=2,
    log_every=1,
    save_every=2,
    ema=0.3,
)
