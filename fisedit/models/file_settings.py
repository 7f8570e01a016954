"""The settings that one file of a model tells of itself: in its header, by marker tensors, or in a .yaml beside it.

The header's fields are those of ModelSpec (github.com/Stability-AI/ModelSpec). Knows files; loads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fisedit.errors import ModelError
from fisedit.models.families.family import SD2, Family
from fisedit.models.weight_files import Shapes, read_metadata

MARKERS = frozenset({"v_pred", "ztsnr"})
"""Names of tensors without content that trainers and web UIs mark files by."""

_PREDICTIONS = {
    **dict.fromkeys(("epsilon", "eps"), "epsilon"),
    **dict.fromkeys(("v", "v_prediction", "vpred", "v_pred", "velocity"), "v_prediction"),
}
"""Word for a prediction type -> diffusers' name of it."""

_ARCHITECTURES = {"stable-diffusion-v2-512": "epsilon", "stable-diffusion-v2-768-v": "v_prediction"}
"""Architecture that ModelSpec names -> its prediction type."""

_V_PARAMETERIZATION = re.compile(r"""^\s*parameterization:\s*["']?v\b""", re.MULTILINE)
_RESOLUTION = re.compile(r"(\d{2,4})(?:x(\d{2,4}))?")
_LATENT_FACTOR = 8


@dataclass(frozen=True)
class FileSettings:
    """The settings that a file tells.

    Args:
        scheduler: Changes of the scheduler's configuration.
        sample_size: Side in latent cells of the pictures that the UNet was made for; None where it is not told.
        notes: Remarks for the user, on what is told and not obeyed.
    """

    scheduler: Mapping[str, Any] = field(default_factory=dict)
    sample_size: int | None = None
    notes: tuple[str, ...] = ()


def read_settings(path: Path, shapes: Shapes, family: Family) -> FileSettings:
    """Read the settings that a single file tells.

    Args:
        path: The file.
        shapes: Its tensors.
        family: Its family; two kinds of Stable Diffusion 2.x differ by their prediction type alone.

    Raises:
        ModelError: It tells two prediction types, one that is not known, or none where it is needed.
    """
    header = {
        name.removeprefix("modelspec."): text for name, text in read_metadata(path).items() if "modelspec" in name
    }
    is_sd2 = family == SD2
    prediction = _prediction(path, shapes, header, is_sd2=is_sd2)
    scheduler: dict[str, Any] = {} if prediction is None else {"prediction_type": prediction}
    if "ztsnr" in shapes:
        scheduler["rescale_betas_zero_snr"] = True
    side, notes = _sample_size(header.get("resolution", "")), tuple(_notes(path, header, family.encoder_layer))
    if side is None and is_sd2:
        side = 96 if prediction == "v_prediction" else 64
    return FileSettings(scheduler, side, notes)


def _prediction(path: Path, shapes: Shapes, header: Mapping[str, str], *, is_sd2: bool) -> str | None:
    """The prediction type in diffusers' name; None for that of Stable Diffusion 1.x."""
    found = dict(_told(path, shapes, header))
    if len(set(found.values())) > 1:
        told = " and ".join(f"{kind} by {where}" for where, kind in found.items())
        raise ModelError(f"{path} must tell one prediction type, got {told}; correct what is wrong")
    if found:
        return next(iter(found.values()))
    if is_sd2 and not path.with_suffix(".yaml").is_file():
        raise ModelError(
            "one file of Stable Diffusion 2.x does not tell its prediction type; put its "
            f"{path.with_suffix('.yaml').name} beside it, or convert it to a diffusers folder"
        )
    return "epsilon" if is_sd2 else None


def _told(path: Path, shapes: Shapes, header: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield every place where a file tells its prediction type, with diffusers' name of the type."""
    if word := header.get("prediction_type", "").strip().lower().replace("-", "_"):
        if word not in _PREDICTIONS:
            raise ModelError(f"modelspec.prediction_type of {path} must be epsilon or v, got {word!r:.60}; get another")
        yield "modelspec.prediction_type", _PREDICTIONS[word]
    if kind := _ARCHITECTURES.get(header.get("architecture", "")):
        yield "modelspec.architecture", kind
    if "v_pred" in shapes:
        yield "the tensor v_pred", "v_prediction"
    beside = path.with_suffix(".yaml")
    if beside.is_file():
        try:
            text = beside.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{beside} cannot be read as text; remove it, or download it again") from error
        if _V_PARAMETERIZATION.search(text):  # one that does not say it is of epsilon, or says nothing
            yield beside.name, "v_prediction"


def _sample_size(resolution: str) -> int | None:
    """The side in latent cells of a resolution such as "768x768", or None."""
    match = _RESOLUTION.fullmatch(resolution.strip())
    if match is None or match[2] not in (None, match[1]) or int(match[1]) % _LATENT_FACTOR:
        return None
    return int(match[1]) // _LATENT_FACTOR


def _notes(path: Path, header: Mapping[str, str], own_layer: int) -> Iterator[str]:
    """Remarks on fields that are told and not obeyed."""
    resolution, layer = header.get("resolution", ""), header.get("encoder_layer", "1").strip()
    if resolution and _sample_size(resolution) is None:
        yield f"{path.name} tells a resolution of {resolution:.20}, which sets no size here; give width and height"
    if layer.isdecimal() and int(layer) > own_layer:
        yield f"{path.name} was made with clip skip {int(layer)}; clip_skip={int(layer) - own_layer} reads prompts so"
