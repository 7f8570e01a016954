"""The settings of a training run, read from one TOML file. Knows nothing of models."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar


class ConfigError(ValueError):
    """A configuration file says something that can't be used."""


@dataclass(frozen=True)
class Plan:
    """How long and how fast one stage trains; it ends when either budget is spent, and so does the cosine decay.

    Checkpoints are written every `save_seconds`, and with every report.
    """

    batch: int
    seconds: float
    steps: int
    learning_rate: float
    warmup: int = 200
    weight_decay: float = 0.0
    average: float = 0.999
    log_every: int = 50
    report_every: int = 500
    save_seconds: float = 300.0


@dataclass(frozen=True)
class Scenes:
    """The drawn scenes: how many, how large, from which seed (held-out scenes start at `held_out_seed`).

    A `count` of 0 has the autoencoder's scenes drawn afresh at every step. Of those, a `painted` share of the objects
    takes a random hue or pattern. `objects` are the nouns that may occur, empty for all.
    """

    side: int = 256
    count: int = 8000
    seed: int = 1
    held_out: int = 64
    held_out_seed: int = 1_000_000
    painted: float = 0.0
    objects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Autoencoder:
    """Shape and loss weights of the autoencoder; `crop` is the side of the training crops in pixels.

    Every `whole_every`-th step sees whole pictures instead.
    """

    plan: Plan
    channels: tuple[int, ...] = (16, 32, 64, 128)
    layers: int = 1
    groups: int = 8
    crop: int = 64
    whole_every: int = 2
    on_objects: float = 0.85
    gradient_weight: float = 0.3
    colour_weight: float = 0.0
    divergence_weight: float = 1e-4


@dataclass(frozen=True)
class Decoder:
    """The last polish: whole pictures, latents fixed but for `noise` (of their spread), the decoder alone."""

    plan: Plan
    noise: float = 0.05


@dataclass(frozen=True)
class Denoiser:
    """Shape of text encoder and UNet, and the objective."""

    plan: Plan
    channels: tuple[int, ...] = (64, 128, 192)
    layers: int = 1
    groups: int = 16
    heads: int = 4
    text_width: int = 128
    text_layers: int = 2
    text_heads: int = 4
    text_dropout: float = 0.1
    prediction: str = "v_prediction"
    snr_cap: float = 5.0
    token_weight: float = 0.05
    pixel_weight: float = 0.05
    pictures: int = 12000


@dataclass(frozen=True)
class CloseUps:
    """Before the denoiser sees whole scenes: single objects in a window of half the side, a fifth of the work.

    No `pictures` leave it out.
    """

    plan: Plan
    pictures: int = 12000


@dataclass(frozen=True)
class Config:
    """The whole run.

    Args:
        start: a folder with a pipeline whose weights are trained on wherever they have the right shape, "" for none.
        products: what convolutions multiply on a CPU: "fp32", or "bf16" where the CPU is fast at it (sums stay fp32).
        start_without: what is initialised anew all the same: "text_encoder", or parts of the names of UNet weights.
        frozen: "text_encoder" where its weights stay as they start, as Stable Diffusion's did.
    """

    seed: int
    start: str
    scenes: Scenes
    autoencoder: Autoencoder
    decoder: Decoder
    closeups: CloseUps
    denoiser: Denoiser
    products: str = "fp32"
    start_without: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


T = TypeVar("T")


def load_config(path: Path) -> Config:
    """Reads a run's settings.

    Raises:
        ConfigError: the file is missing, is not TOML, or names a setting that does not exist.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config must be a readable TOML file, got {path}: {error}") from error
    return Config(
        seed=table.get("seed", 0),
        start=table.get("start", ""),
        start_without=tuple(table.get("start_without", ())),
        frozen=tuple(table.get("frozen", ())),
        scenes=_build(Scenes, table.get("scenes", {})),
        autoencoder=_stage(Autoencoder, table, "autoencoder"),
        decoder=_stage(Decoder, table, "decoder"),
        closeups=_stage(CloseUps, table, "closeups"),
        denoiser=_stage(Denoiser, table, "denoiser"),
        products=table.get("products", "fp32"),
    )


def _stage(kind: type[T], table: dict[str, Any], name: str) -> T:
    settings = dict(table.get(name, {}))
    return _build(kind, settings | {"plan": _build(Plan, settings.get("plan", {}))})


def _build(kind: type[T], settings: dict[str, Any]) -> T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(settings) - known):
        raise ConfigError(f"{kind.__name__} has no setting {unknown[0]!r}: use one of {', '.join(sorted(known))}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__} lacks a setting: {error}") from error
