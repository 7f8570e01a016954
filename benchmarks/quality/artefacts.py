"""Artefacts that a person sees in an edited picture, by name and strength, and the verdict that they amount to.

The picture is compared with the drawn truth as the autoencoder shows it, so that its blur is no artefact. A colour
counts where none like it is near in the truth: a pixel or two of displacement is none either. Without a truth, only
the classifier and the region's border speak. Knows pictures and scenes, no method and no model but the classifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import ndimage
from skimage.color import rgb2lab

from benchmarks.classifier import ADJECTIVES, WORDS
from benchmarks.scenes.vocabulary import COLOURS
from fisedit.bench.metrics import cells_to_pixels
from fisedit.sparse_kernels.dilation import dilate
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from benchmarks.classifier import SceneClassifier
    from benchmarks.quality.drawn_truth import DrawnTruth
    from benchmarks.scenes.drawing import Bytes, Floats
    from benchmarks.scenes.layout import SceneChange
    from fisedit.values import BoolGrid

Spots = tuple[tuple[int, float], ...]
"""(pixels, difference in DIN99 from which a person sees a spot of that many); large spots are seen at less."""

VERDICTS = ((2.0, "bad"), (1.0, "visible"), (0.5, "faint"), (0.0, "clean"))
"""The least strength of every verdict."""

AROUND = 2
"""Latent cells around a region in which artefacts are looked for as well."""

SMEAR: Spots = ((60, 3.3), (200, 2.3), (600, 2.0))
TRACE: Spots = ((60, 5.0), (200, 3.0))
OUTLINE: Spots = ((30, 2.5), (100, 1.5))
BROKEN: Spots = ((60, 9.0), (200, 8.0))
CUT: Spots = ((4, 7.0),)  # of cells' edges
LOGIT = 4.0  # of the classifier: a thing that it finds with less is hard to recognise
_BESIDE, _INSIDE = 2, 4  # pixels of displacement that are none, of the background and of the new thing


def is_seen(verdict: str) -> bool:
    """Return whether a verdict says that a person sees something wrong."""
    return verdict in ("visible", "bad")


@dataclass(frozen=True)
class Artefacts:
    """The faults of an edited picture.

    Args:
        strengths: name -> strength, of what could be measured; a person sees it from 1, and is disturbed from 2.
    """

    strengths: Mapping[str, float]

    @property
    def verdict(self) -> str:
        """The word for the strongest artefact: clean, faint, visible or bad."""
        strongest = max(self.strengths.values(), default=0.0)
        return next(word for least, word in VERDICTS if strongest >= least)

    @property
    def seen(self) -> tuple[str, ...]:
        """The names of those that a person sees."""
        return tuple(name for name, strength in self.strengths.items() if strength >= 1)


@dataclass(frozen=True, eq=False)
class EditedPicture:
    """An edited picture with its source and its region.

    Args:
        pixels: uint8 [S, S, 3].
        source: uint8 [S, S, 3].
        painted: latent cells whose pixels may have changed, bool [S/8, S/8].
    """

    pixels: Bytes
    source: Bytes
    painted: BoolGrid


def find_artefacts(
    edited: EditedPicture, change: SceneChange, truth: DrawnTruth | None, classifier: SceneClassifier | None
) -> Artefacts:
    """Measure everything that can be measured of one edit.

    Args:
        edited: the picture, its source and its region.
        change: the scenes before and after.
        truth: what it should show, as the autoencoder shows it; None where that is unknown.
        classifier: None where there is none.
    """
    references = [edited.source] if truth is None else [edited.source, truth.pixels]
    strengths = {"cut": _strength(_straight_edges(edited, references), CUT)}
    if truth is not None:
        strengths |= _beside_truth(edited, truth)
    if classifier is not None:
        strengths |= _recognised(edited, change, classifier)
    return Artefacts(strengths)


def _beside_truth(edited: EditedPicture, truth: DrawnTruth) -> dict[str, float]:
    """Smears, traces and outlines around the new thing, and what is broken of itself."""
    picture, true, source = (_perceived(pixels) for pixels in (edited.pixels, truth.pixels, edited.source))
    beside = cells_to_pixels(dilate(edited.painted, AROUND)) & ~ndimage.binary_dilation(truth.thing, iterations=_INSIDE)
    away = source - true
    distance = np.linalg.norm(away, axis=-1)
    towards_source = ((picture - true) * away).sum(-1) / np.maximum(distance, 5)
    edges = _edges(picture) - ndimage.maximum_filter(_edges(true), 2 * _INSIDE + 1)
    return {
        "smear": _strength(_difference(picture, true, _BESIDE)[beside], SMEAR),
        "trace": _strength(np.maximum(0, ndimage.uniform_filter(towards_source, 5))[beside & (distance > 8)], TRACE),
        "outline": _strength(ndimage.uniform_filter(np.maximum(edges, 0), 3)[beside], OUTLINE),
        "broken": _strength(_difference(picture, true, _INSIDE)[truth.thing], BROKEN),
    }


def _recognised(edited: EditedPicture, change: SceneChange, classifier: SceneClassifier) -> dict[str, float]:
    """The old thing still found, a wrong thing found, and the new one not found, or not in its colour."""
    batch = torch.from_numpy(np.stack([edited.pixels, edited.source])).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        objects, _, adjectives = classifier(batch)
    scores, source_scores = objects.tolist()
    before, after = set(change.before.words), set(change.after.words)
    old = [scores[WORDS.index(word)] for word in before - after]
    new = [scores[WORDS.index(word)] for word in after - before]
    wrong = [
        min(score, score - before_score)
        for word, score, before_score in zip(WORDS, scores, source_scores, strict=True)
        if word not in before | after
    ]
    if change.kind == "recolour":
        placed = change.after.objects[change.index]
        colours = adjectives[0, WORDS.index(placed.word)].tolist()[: len(COLOURS)]
        asked = colours.pop(ADJECTIVES.index(placed.colour))
        new = [asked - max(colours)]
    return {
        "old thing": 2.0 * (max(old, default=-1) > 0),
        "wrong thing": 2.0 * (max(wrong) > 0),
        "missing": float(np.clip(2 - min(new, default=np.inf) / LOGIT, 0, 2)),
    }


def _strength(differences: Any, spots: Spots) -> float:
    """The largest share of what a person sees that the worst pixels reach, over spots of every size."""
    worst = np.sort(np.ravel(differences))[::-1]
    return max((float(worst[pixels - 1]) / least for pixels, least in spots if pixels <= len(worst)), default=0.0)


def _difference(picture: Floats, true: Floats, reach: int) -> Floats:
    """Return how far colours lie from all of the other picture's within some pixels, in either way: [S, S]."""
    both = [_beyond(picture, true, reach), _beyond(true, picture, reach)]
    found: Floats = np.max([ndimage.uniform_filter(each, 5) for each in both], axis=0)
    return found


def _beyond(colours: Floats, others: Floats, reach: int) -> Floats:
    window = (2 * reach + 1, 2 * reach + 1, 1)
    low, high = ndimage.minimum_filter(others, window), ndimage.maximum_filter(others, window)
    distance: Floats = np.linalg.norm(np.maximum(0, np.maximum(colours - high, low - colours)), axis=-1)
    return distance


def _straight_edges(edited: EditedPicture, references: Sequence[Bytes]) -> Floats:
    """Return how much sharper the picture changes across each cell's edge on the border than every reference does."""
    own = _steps(edited.pixels, edited.painted)[:, 3:-3].max(1, initial=0)
    allowed = [_steps(pixels, edited.painted).max(1, initial=0) for pixels in references]
    sharper: Floats = np.maximum(0, own - np.max(allowed, axis=0))
    return sharper


def _steps(pixels: Bytes, grid: BoolGrid) -> Floats:
    """Differences [edges, 14] along the normal of every cell's edge on a border, of means along that edge.

    A straight edge on the border outlasts the mean; a round or slanted one does not.
    """
    reach, steps = LATENT_FACTOR, []
    padded = np.pad(_perceived(pixels), ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    for picture, cells in ((padded, grid), (padded.transpose(1, 0, 2), grid.T)):
        for row, column in np.argwhere(cells[1:] != cells[:-1]):
            start, left = (row + 1) * reach, (column + 1) * reach
            profile = picture[start : start + 2 * reach, left : left + reach].mean(1)
            steps.append(np.linalg.norm(profile[2:] - profile[:-2], axis=-1))
    return np.reshape(steps, (-1, 2 * reach - 2))


def _edges(colours: Floats) -> Floats:
    parts = [ndimage.sobel(colours, axis) for axis in (0, 1)]
    length: Floats = np.sqrt(np.square(parts).sum((0, -1))) / 8
    return length


def _perceived(pixels: Bytes) -> Floats:
    """DIN99 colours [S, S, 3], a little blurred: in them, unlike in CIELAB, equal steps look equal (DIN 6176)."""
    lightness, red, blue = np.moveaxis(rgb2lab(pixels), -1, 0)
    turn = np.deg2rad(16)
    e, f = red * np.cos(turn) + blue * np.sin(turn), 0.7 * (blue * np.cos(turn) - red * np.sin(turn))
    chroma = 0.045 * np.maximum(np.hypot(e, f), 1e-6)
    shrunk = np.log1p(chroma) / chroma
    colours = np.stack([105.51 * np.log1p(0.0158 * lightness), shrunk * e, shrunk * f], axis=-1)
    blurred: Floats = ndimage.gaussian_filter(colours, (1, 1, 0))
    return blurred
