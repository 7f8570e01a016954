"""`python -m benchmarks.quality --adapter`: edits with a reference picture, beside the same edits without it.

Measures the distance of the edited object's appearance from the reference's, in the classifier's features, in the
colour distribution and in the mean colour. Also measures whether the edit succeeds, and whether it keeps all bytes
outside its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.utils import make_image_grid
from PIL import Image
from skimage.color import rgb2lab

from benchmarks.quality.edit_quality import find_classifier
from benchmarks.quality.reference_edits import (
    MAX_ROUNDTRIP_ERROR,
    MIN_COLOUR_CHANGE,
    ReferenceEdit,
    sample_reference_edit,
)
from benchmarks.quality.scene_edits import known_words
from benchmarks.quality.scores import edit_succeeded
from fisedit import __version__
from fisedit.bench import metrics
from fisedit.editor import Editor
from fisedit.errors import InputError
from fisedit.models.vae import encode
from fisedit.storage import images

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from benchmarks.classifier import SceneClassifier
    from benchmarks.scenes.drawing import Bytes, Floats, Mask
    from benchmarks.settings import ReferenceQualitySettings
    from fisedit.history import EditResult
    from fisedit.values import OnStep

NOTES = (
    "an object of an opened drawn scene is swapped in the given true mask, with the same seed with and without",
    "features: cosine distance of the classifier's last features of the object alone, on grey",
    "histogram: earth mover's distances of the object's colours along L, a and b, as one vector's length",
    "colour: distance of mean colours in Lab, over the pixels that the object covers in the drawing of the new scene",
    "drawn: the new scene drawn with the appearance and passed through the autoencoder, an adapter's upper bound",
    "done: the classifier, not trained on such appearances, finds the new object, and not the old one",
    "closer: edits that the reference brings nearer to it; gain: median of without less with, pair by pair",
    f"appearances are warm or grey, {MAX_ROUNDTRIP_ERROR:.0f} levels off at most when decoded",
    f"and they are {MIN_COLOUR_CHANGE:.0f} levels at least from the object's own",
)

_SHEET_ROWS = 16
_GREY = 128

MaskedObject = tuple["Bytes", "Mask"]
"""A picture, uint8 [S, S, 3], and the pixels of an object in it, bool [S, S]."""


def measure_reference_quality(settings: ReferenceQualitySettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Make edits with and without a reference, and measure both against the reference.

    Args:
        settings: what is measured, and with which model and adapter.
        on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "notes", "summary", "edits"}, ready for JSON.

    Raises:
        InputError: there is no classifier.
        ModelError: the model, the adapter or the classifier cannot be loaded.
    """
    classifier, missing = find_classifier(settings.model, settings.classifier)
    if classifier is None:
        raise InputError(f"references need a classifier to compare with: {' '.join(missing)}; name one with judge")
    offline, device, dtype = settings.local_files_only, settings.device, settings.dtype
    first = Editor.from_pretrained(settings.model, device=device, dtype=dtype, local_files_only=offline)
    first.load_adapter(settings.adapter, settings.scale, local_files_only=offline)
    edits, tiles = [], []
    for i, (edit, source, results) in enumerate(_run_edits(first, settings, on_step)):
        edits.append(_edit_dict(classifier, edit, source, results))
        if i < _SHEET_ROWS:
            tiles += [edit.picture, edit.reference, *(np.asarray(r.image) for r in results), edit.target]
    if settings.html is not None:
        grid = make_image_grid([Image.fromarray(tile) for tile in tiles], len(tiles) // 5, 5)
        images.write_image(grid, settings.html / "references.png")
    dtype = str(first.pipe.unet.dtype).removeprefix("torch.")
    return {
        "settings": _settings_dict(settings) | {"dtype": dtype},
        "notes": NOTES,
        "summary": summary_rows(edits),
        "edits": edits,
    }


def _run_edits(
    first: Editor, settings: ReferenceQualitySettings, on_step: OnStep | None
) -> Iterator[tuple[ReferenceEdit, EditResult, tuple[EditResult, EditResult]]]:
    """Every edit, its source, and its results without and with the reference."""
    words, roundtrip = known_words(first.pipe), partial(_roundtrip, first.pipe)
    for i in range(settings.edits):
        if on_step is not None:
            on_step(i, settings.edits, None)
        rng = np.random.default_rng((settings.seed, i))
        edit = sample_reference_edit(rng, first.native_size, words, roundtrip, same=i % 2 == 0)
        editor = first.beside()
        source = editor.open(
            Image.fromarray(edit.picture),
            edit.change.prompts[0],
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
        )
        prompt, mask = edit.change.prompts[1], metrics.pixels_to_cells(edit.inside)
        guided = editor.edit(prompt, mask=mask, reference=Image.fromarray(edit.reference))
        editor.checkout(source.id)
        plain = editor.edit(prompt, mask=mask, growth=guided.run.growth or None)  # alike but for the reference
        yield edit, source, (plain, guided)


def distances(classifier: SceneClassifier, one: MaskedObject, other: MaskedObject) -> dict[str, float]:
    """Return the distances of two objects' appearances, by `DISTANCES`.

    Args:
        classifier: The classifier of drawn scenes.
        one: a picture and the object's pixels.
        other: another picture and its object's pixels.
    """
    return {name: distance(classifier, one, other) for name, distance in DISTANCES.items()}


def feature_distance(classifier: SceneClassifier, one: MaskedObject, other: MaskedObject) -> float:
    """Cosine distance, 0 to 2, of the classifier's features.

    Args:
        classifier: The classifier of drawn scenes.
        one: pixels and mask of an object.
        other: The pixels and mask of another object.
    """
    return float(1 - F.cosine_similarity(_features(classifier, *one), _features(classifier, *other), dim=0))


def histogram_distance(_: SceneClassifier | None, one: MaskedObject, other: MaskedObject) -> float:
    """Earth mover's distance of colours along each axis of Lab, the three as one vector. See `feature_distance`."""
    shares = np.linspace(0, 1, 101)
    quantiles = [np.quantile(_lab_colours(*shown), shares, axis=0) for shown in (one, other)]
    return float(np.linalg.norm(np.abs(quantiles[0] - quantiles[1]).mean(0)))


def colour_distance(_: SceneClassifier | None, one: MaskedObject, other: MaskedObject) -> float:
    """Distance of mean colours in Lab. See `feature_distance`."""
    return float(np.linalg.norm(_lab_colours(*one).mean(0) - _lab_colours(*other).mean(0)))


DISTANCES: dict[str, Callable[[SceneClassifier, MaskedObject, MaskedObject], float]] = {
    "features": feature_distance,
    "histogram": histogram_distance,
    "colour": colour_distance,
}


def summary_rows(edits: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for every distance: over all edits, over references of the same object, and over those of another.

    Args:
        edits: the report's.
    """
    groups = {
        "all": edits,
        "the same thing": [e for e in edits if e["same"]],
        "another": [e for e in edits if not e["same"]],
    }
    return [
        _summary_row(group, group_edits, name)
        for group, group_edits in groups.items()
        if group_edits
        for name in DISTANCES
    ]


def _summary_row(group: str, edits: Sequence[dict[str, Any]], distance: str) -> dict[str, str]:
    without_reference, with_reference, drawn_target = (
        [edit[side][distance] for edit in edits] for side in ("without", "with", "drawn")
    )
    gains = [a - b for a, b in zip(without_reference, with_reference, strict=True)]
    shares = {f"done {side}": fmean(edit[side]["success"] for edit in edits) for side in ("without", "with", "drawn")}
    return {
        "reference shows": group,
        "edits": str(len(edits)),
        "distance": distance,
        "without": f"{median(without_reference):.3g}",
        "with": f"{median(with_reference):.3g}",
        "drawn": f"{median(drawn_target):.3g}",
        "gain": f"{median(gains):.3g}",
        "closer": f"{sum(gain > 0 for gain in gains)} of {len(edits)}",
        **{name: f"{share:.0%}" for name, share in shares.items()},
        "exact outside": f"{fmean(edit['with']['exact'] for edit in edits):.0%}",
    }


def _settings_dict(settings: ReferenceQualitySettings) -> dict[str, Any]:
    return {
        "model": settings.model,
        "adapter": settings.adapter,
        "scale": settings.scale,
        "edits": settings.edits,
        "seed": settings.seed,
        "num_inference_steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale,
        "fisedit": __version__,
    }


def _edit_dict(
    classifier: SceneClassifier, edit: ReferenceEdit, source: EditResult, results: tuple[EditResult, EditResult]
) -> dict[str, Any]:
    """An edit's prompts, and the distances and success without and with the reference, and of the drawn target."""

    def measure(picture: Image.Image) -> dict[str, Any]:
        found = distances(classifier, (np.asarray(picture), edit.object_mask), (edit.reference, edit.reference_mask))
        return found | {"success": edit_succeeded(classifier, edit.change, picture)}

    old, new = edit.change.prompts
    report: dict[str, Any] = {"source_prompt": old, "prompt": new, "same": edit.same}
    for name, result in zip(("without", "with"), results, strict=True):
        exact = metrics.equal_outside(result.image, source.image, result.mask.grid)
        report[name] = measure(result.image) | {"exact": exact}
    return report | {"drawn": measure(Image.fromarray(edit.target))}


@torch.inference_mode()
def _roundtrip(pipe: StableDiffusionPipeline, pixels: Bytes) -> Bytes:
    """A picture [S, S, 3], encoded and decoded."""
    decoded = pipe.vae.decode(encode(pipe.vae, Image.fromarray(pixels)) / pipe.vae.config.scaling_factor).sample
    picture: Bytes = np.array(pipe.image_processor.postprocess(decoded)[0])
    return picture


@torch.no_grad()
def _features(classifier: SceneClassifier, pixels: Bytes, mask: Mask) -> torch.Tensor:
    """The classifier's features of an object alone: [160], mean over its pixels."""
    object_pixels = np.where(mask[..., None], pixels, np.uint8(_GREY))
    features = classifier.features(torch.from_numpy(object_pixels).permute(2, 0, 1)[None].float() / 127.5 - 1)[0]
    height, width = features.shape[-2:]
    shares = F.adaptive_avg_pool2d(torch.from_numpy(mask)[None, None].float(), (height, width))[0]
    return (features * shares).sum((1, 2)) / shares.sum()


def _lab_colours(pixels: Bytes, mask: Mask) -> Floats:
    """An object's pixels in CIE Lab, [n, 3]."""
    colours: Floats = rgb2lab(pixels[mask])
    return colours
