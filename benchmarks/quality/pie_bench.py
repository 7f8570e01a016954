"""PIE-Bench from a local folder (Ju et al., arXiv 2310.01506): its edits, and its metrics that need no model.

Follows the published evaluation. The border always counts as edited. The edited part is set to black in both pictures,
and means run over the whole picture. So PSNR and SSIM lie above those of the background alone, the more so the larger
the edited part is. Structure distance, LPIPS and CLIP similarity need models that fisedit does not include.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from fisedit.bench.edit_case import BenchmarkEdit
from fisedit.bench.metrics import IDENTICAL
from fisedit.errors import InputError

if TYPE_CHECKING:
    from fisedit.values import BoolGrid

SIDE = 512
"""Pixels on a side of every picture and mask."""

TYPES = (
    "random",
    "change object",
    "add object",
    "delete object",
    "change content",
    "change pose",
    "change colour",
    "change material",
    "change background",
    "change style",
)
"""The dataset's types of edit, by their number."""


@dataclass(frozen=True)
class BackgroundMetrics:
    """The published metrics of the part that should stay.

    Args:
        psnr: in dB.
        mse: mean square error of levels in [0, 1].
        ssim: structural similarity, -1 to 1.
    """

    psnr: float
    mse: float
    ssim: float


def read_mapping(folder: Path) -> list[dict[str, Any]]:
    """The dataset's entries, from mapping_file.json.

    Args:
        folder: the dataset's.

    Raises:
        InputError: there is no such file, or its content is of another form.
    """
    path = folder / "mapping_file.json"
    try:
        entries = list(json.loads(path.read_text(encoding="utf-8")).values())
        keys = {"image_path", "original_prompt", "editing_prompt", "editing_type_id", "mask"}
        if entries and all(keys <= set(entry) for entry in entries):
            return entries
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"pie_bench must be a folder with PIE-Bench's mapping_file.json, got {folder}") from error
    raise InputError(f"{path} must hold entries with {', '.join(sorted(keys))}; copy the dataset again")


def dataset_notes(side: int) -> tuple[str, ...]:
    """Notes on this dataset's metrics for a model whose pictures have `side` x `side` pixels."""
    left_out = (
        "structure distance, LPIPS and CLIP similarity are left out: they need models that fisedit does not include"
    )
    scaled = (
        f"pictures and masks are scaled from {SIDE} to the model's {side} pixels: figures are not the published ones"
    )
    return (left_out,) if side == SIDE else (left_out, scaled)


def load_edits(folder: Path, entries: Sequence[dict[str, Any]], side: int) -> Iterator[BenchmarkEdit]:
    """The dataset's edits, pictures and masks scaled to the model's size.

    Args:
        folder: the dataset's.
        entries: The entries of `read_mapping`.
        side: The side of the pictures, in pixels.

    Raises:
        InputError: a picture is missing or damaged, or a mask is no list of runs.
    """
    for entry in entries:
        path = folder / "annotation_images" / entry["image_path"]
        try:
            with Image.open(path) as image:
                picture = image.convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
        except (OSError, UnidentifiedImageError) as error:
            raise InputError(f"{path} must be a picture, got none that can be read; copy the dataset again") from error
        mask = Image.fromarray(decode_runs(entry["mask"])).resize((side, side), Image.Resampling.NEAREST)
        old, new = (entry[key].replace("[", "").replace("]", "") for key in ("original_prompt", "editing_prompt"))
        yield BenchmarkEdit(TYPES[int(entry["editing_type_id"])], old, new, picture, true_mask=np.asarray(mask, bool))


def decode_runs(runs: Sequence[int], side: int = SIDE) -> BoolGrid:
    """The mask of start and length pairs over row-major pixels; its border is always inside.

    Args:
        runs: start, length, start, length, ...
        side: The side of the mask, in pixels.

    Returns:
        Booleans [side, side].

    Raises:
        InputError: a number without its partner, or a start outside the picture.
    """
    starts, lengths = runs[0::2], runs[1::2]
    if len(starts) != len(lengths) or not all(0 <= start < side**2 for start in starts):
        raise InputError(f"mask must be start and length pairs within {side}x{side} pixels; copy the dataset again")
    flat = np.zeros(side**2, bool)
    for start, length in zip(starts, lengths, strict=True):
        flat[start : start + length] = True
    mask = flat.reshape(side, side)
    mask[[0, -1], :] = mask[:, [0, -1]] = True
    return mask


def background_metrics(picture: Image.Image, source: Image.Image, edited: BoolGrid) -> BackgroundMetrics | None:
    """The published metrics of the pixels that are not edited.

    Args:
        picture: the edited one, [H, W] pixels.
        source: the picture before.
        edited: booleans [H, W].

    Returns:
        The metrics, or None where all pixels are edited.
    """
    from skimage.metrics import structural_similarity

    if edited.all():
        return None
    a, b = (np.where(edited[..., None], 0, np.asarray(p.convert("RGB"), np.float64) / 255) for p in (picture, source))
    mse = float(np.mean((a - b) ** 2))
    ssim = structural_similarity(
        a, b, data_range=1.0, channel_axis=-1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
    )
    return BackgroundMetrics(float(10 * np.log10(1 / max(mse, IDENTICAL / 255**2))), mse, float(ssim))
