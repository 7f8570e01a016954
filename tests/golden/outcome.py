"""What a case leaves behind: a picture, a mask, a map, and plain values; and how two of them are compared.

Kernels of different CPUs add in different orders: float32 results agree but for the last bits, and a pixel that lies
between two grey levels may be rounded the other way. So equality is demanded on the kind of CPU and the version of
torch that made the set; elsewhere `Tolerance` says how far pixels may be off.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisedit import EditResult

STATS = (
    "mask_area",
    "mask_source",
    "mask_confidence",
    "active_rows",
    "growth",
    "unet_evaluations_dense",
    "unet_evaluations_sparse",
    "unet_evaluations_captured",
    "uncaptured",
    "macs",
    "macs_dense",
    "fallback",
    "notes",
    "steps_shared",
    "recorded_bytes",
)
"""Fields of a result's stats that do not depend on the machine's speed."""

_INEXACT = ("mask_confidence", "confidence")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Shot:
    """One outcome of a case.

    Args:
        told: JSON-ready values. picture: what was made. mask: latent cells [h, w]. map: floats [h, w] in 0 to 1.
    """

    told: dict[str, Any]
    picture: Image.Image | None = None
    mask: NDArray[np.bool_] | None = None
    map: NDArray[np.float32] | None = None


def shot_of_result(result: EditResult) -> Shot:
    """Picture, mask and stats of a result."""
    stats = result.stats.as_dict()
    told = {name: stats[name] for name in STATS} | {"id": result.id, "parent": result.parent}
    told |= {"change": str(result.diff), "structure": result.run.structure, "start": result.run.start}
    return Shot(told | {"checked": result.run.checked}, result.image, result.mask.grid)


def shot_of_preview(seen: Any) -> Shot:
    """Mask and cost of an edit that was not run."""
    names = ("confidence", "pieces", "macs", "macs_dense", "fallback", "nothing")
    return Shot({name: getattr(seen, name) for name in names} | {"change": str(seen.diff)}, mask=seen.mask.grid)


def shot_of_map(heat: NDArray[np.float32]) -> Shot:
    """A map."""
    return Shot({"shape": heat.shape, "dtype": str(heat.dtype)}, map=heat)


def shot_of_picture(image: Image.Image) -> Shot:
    """A picture without a history."""
    return Shot({}, image)


@dataclass(frozen=True)
class Tolerance:
    """How far an outcome may be from the stored one.

    Args:
        levels: grey levels that a pixel may be off by. share: of the pixels that may be off at all.
        decimals: largest difference of confidences and maps.
    """

    levels: int = 0
    share: float = 0.0
    decimals: float = 0.0


EXACT = Tolerance()
ELSEWHERE = Tolerance(levels=1, share=0.005, decimals=1e-3)
"""On another kind of CPU than the one that made a set, or with another version of torch. With AVX2 kernels on the CPU
that made it, at most 4 of 15360 pixels were off."""


@dataclass(frozen=True)
class Difference:
    """How two pictures of one size and mode differ.

    Args:
        pixels, total: how many differ, of how many. levels: the largest difference of a channel.
    """

    pixels: int
    total: int
    levels: int

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.pixels} of {self.total} pixels differ, by up to {self.levels} grey levels"

    def within(self, tolerance: Tolerance) -> bool:
        """Whether so much is allowed."""
        return self.levels <= tolerance.levels and self.pixels <= tolerance.share * self.total


def difference(ours: Image.Image, stored: Image.Image) -> Difference:
    """Compare the pixels of two pictures."""
    assert (ours.mode, ours.size) == (stored.mode, stored.size), "pictures of another mode or size"
    gaps = np.abs(np.asarray(ours, np.int32) - np.asarray(stored, np.int32)).reshape(ours.width * ours.height, -1)
    return Difference(int(gaps.any(axis=1).sum()), len(gaps), int(gaps.max()))


def complaints(name: str, ours: Shot, stored: Shot, tolerance: Tolerance) -> list[str]:
    """What is not as it was stored, a line each; differences of pixels that are allowed are printed."""
    found = [f"{name}: {line}" for line in _values(ours.told, stored.told, tolerance)]
    if ours.picture is not None and stored.picture is not None:
        gap = difference(ours.picture, stored.picture)
        if gap.pixels:
            print(f"{name}: {gap}")  # noqa: T201
        found += [] if gap.within(tolerance) else [f"{name}: {gap}"]
    if ours.mask is not None and stored.mask is not None:
        cells = int((ours.mask != stored.mask).sum()) if ours.mask.shape == stored.mask.shape else "all"
        found += [f"{name}: {cells} cells of the mask differ"] if cells else []
    if ours.map is not None and stored.map is not None:
        gap_of_map = float(np.abs(ours.map - stored.map).max())
        found += [f"{name}: the map differs by up to {gap_of_map:.3g}"] if gap_of_map > tolerance.decimals else []
    there = [getattr(ours, part) is None for part in ("picture", "mask", "map")]
    return found + ([] if there == _missing(stored) else [f"{name}: a picture, mask or map is missing or new"])


def _missing(shot: Shot) -> list[bool]:
    return [getattr(shot, part) is None for part in ("picture", "mask", "map")]


def _values(ours: Mapping[str, Any], stored: Mapping[str, Any], tolerance: Tolerance) -> list[str]:
    """Values that differ, lists and tuples being the same."""
    lines = []
    for key in sorted(set(ours) | set(stored)):
        mine, theirs = _plain(ours.get(key)), _plain(stored.get(key))
        near = key in _INEXACT and None not in (mine, theirs) and abs(mine - theirs) <= tolerance.decimals
        if mine != theirs and not near:
            lines.append(f"{key} is {mine!r}, was {theirs!r}")
    return lines


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def save(shot: Shot, folder: Path, name: str) -> dict[str, Any]:
    """Write a shot's pictures, and return what the set's JSON holds of it."""
    if shot.picture is not None:
        shot.picture.save(folder / f"{name}.png", optimize=True)
    if shot.mask is not None:
        Image.fromarray(shot.mask).save(folder / f"{name}.mask.png")
    if shot.map is not None:
        np.save(folder / f"{name}.npy", shot.map)
    return shot.told


def load(folder: Path, name: str, told: dict[str, Any]) -> Shot:
    """A stored shot."""
    numbers, mask = folder / f"{name}.npy", _opened(folder / f"{name}.mask.png")
    return Shot(
        told,
        _opened(folder / f"{name}.png"),
        None if mask is None else np.asarray(mask),
        np.load(numbers) if numbers.exists() else None,
    )


def _opened(path: Path) -> Image.Image | None:
    if not path.exists():
        return None
    with Image.open(path) as image:
        image.load()
        return image


def machine() -> dict[str, Any]:
    """What decides the last bits of float32 results: the CPU's kind and the version of torch."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(told.get("flags", "").split())
    return {
        "cpu": told.get("model name") or platform.processor(),
        "architecture": platform.machine(),
        "flags": {flag: flag in flags for flag in _FLAGS},
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
