"""`fisedit bench quality --adapter`: edits that take a reference's look, beside the same edits without it.

How far the edited thing is from the reference's, with and without: in the judge's features, in how its colours are
spread, and in its mean colour; and whether the edit succeeds, and keeps all bytes outside its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.utils import make_image_grid
from PIL import Image
from skimage.color import rgb2lab

from fisedit import __version__
from fisedit.editor import Editor
from fisedit.errors import InputError
from fisedit.evaluation.quality import metrics
from fisedit.evaluation.quality.edit_quality import find_judge
from fisedit.evaluation.quality.reference_edits import PAINTABLE, VISIBLE, ReferenceEdit, sample_reference_edit
from fisedit.evaluation.quality.scene_edits import vocabulary
from fisedit.evaluation.quality.scores import edit_succeeded
from fisedit.models.vae import encode
from fisedit.storage import images

if TYPE_CHECKING:
    from pathlib import Path

    from diffusers import StableDiffusionPipeline

    from fisedit.evaluation.classifier import SceneClassifier
    from fisedit.evaluation.scenes.drawing import Bytes, Floats, Mask
    from fisedit.history import EditResult
    from fisedit.values import OnStep

NOTES = (
    "a thing of an opened drawn scene is swapped for another, in the given true mask, same seed with and without",
    "features: cosine distance of the judge's last features of the thing alone, on grey",
    "histogram: earth mover's distances of the thing's colours along L, a and b, as one vector's length",
    "colour: distance of mean colours in Lab; the thing is what the drawing of the new scene covers, in every picture",
    "drawn: the new scene drawn in the look and passed through the autoencoder, the best that an adapter could do",
    "done: the judge, which saw no such looks, sees the new thing, and not the old one",
    "closer: edits that the reference brings nearer to it; gain: median of without less with, pair by pair",
    f"looks are warm or grey, {PAINTABLE:.0f} levels off at most when decoded, and {VISIBLE:.0f} at least from the own",
)

_SHOWN = 16
_GREY = 128

ObjectKind = tuple["Bytes", "Mask"]
"""A picture, uint8 [S, S, 3], and the pixels of a thing in it [S, S]."""


def run(
    *,
    adapter: str,
    scale: float = 1.0,
    model: str = "demo",
    edits: int = 60,
    num_inference_steps: int = 25,
    guidance_scale: float = 4.0,
    seed: int = 0,
    judge: Path | None = None,
    html: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    local_files_only: bool = False,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Make edits with a reference and without it, and measure both against the reference.

    Args:
        adapter, scale: as of `Editor.load_adapter`. model, judge: as of `quality.run.run`.
        edits: how many. seed: of the edits. html: folder for references.png, a row for each of the first edits: source,
            reference, edited without, with, and drawn.
        local_files_only: never reach for the network. on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "notes", "summary", "edits"}, ready for JSON.

    Raises:
        InputError: there is no judge. ModelError: the model, the adapter or the judge cannot be loaded.
    """
    critic, why = find_judge(model, judge)
    if critic is None:
        raise InputError(f"references need a judge that compares: {' '.join(why)}; name one with judge")
    first = Editor.from_pretrained(model, device=device, dtype=dtype, local_files_only=local_files_only)
    first.load_adapter(adapter, scale, local_files_only=local_files_only)
    words, told, rows = vocabulary(first.pipe.tokenizer), [], []
    for i in range(edits):
        if on_step is not None:
            on_step(i, edits, None)
        rng, again = np.random.default_rng((seed, i)), partial(_again, first.pipe)
        edit = sample_reference_edit(rng, first.native_size, words, again, same=i % 2 == 0)
        editor = first.beside()
        source = editor.open(
            Image.fromarray(edit.picture),
            edit.change.prompts[0],
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
        )
        prompt, mask = edit.change.prompts[1], metrics.cells(edit.inside)
        taken = editor.edit(prompt, mask=mask, reference=Image.fromarray(edit.reference))
        editor.checkout(source.id)
        results = editor.edit(prompt, mask=mask, growth=taken.growth or None), taken  # alike but for the reference
        told.append(_told(critic, edit, source, *results))
        rows += [edit.picture, edit.reference, *(np.asarray(r.image) for r in results), edit.painted] * (i < _SHOWN)
    settings = {"model": model, "adapter": adapter, "scale": scale, "edits": edits, "seed": seed}
    settings |= {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale, "fisedit": __version__}
    settings |= {"dtype": str(first.pipe.unet.dtype).removeprefix("torch.")}
    if html is not None:
        images.write_image(make_image_grid([*map(Image.fromarray, rows)], len(rows) // 5, 5), html / "references.png")
    return {"settings": settings, "notes": NOTES, "summary": summary(told), "edits": told}


def distances(judge: SceneClassifier, one: ObjectKind, other: ObjectKind) -> dict[str, float]:
    """How far two things in pictures look apart, by `DISTANCES`."""
    return {name: measure(judge, one, other) for name, measure in DISTANCES.items()}


def feature_distance(judge: SceneClassifier, one: ObjectKind, other: ObjectKind) -> float:
    """Cosine distance, 0 to 2, of the judge's features."""
    return float(1 - F.cosine_similarity(_features(judge, *one), _features(judge, *other), dim=0))


def histogram_distance(_: SceneClassifier | None, one: ObjectKind, other: ObjectKind) -> float:
    """Earth mover's distance of colours along each axis of Lab, the three as one vector."""
    shares = np.linspace(0, 1, 101)
    spread = [np.quantile(_colours(*thing), shares, axis=0) for thing in (one, other)]
    return float(np.linalg.norm(np.abs(spread[0] - spread[1]).mean(0)))


def colour_distance(_: SceneClassifier | None, one: ObjectKind, other: ObjectKind) -> float:
    """Distance of mean colours in Lab."""
    return float(np.linalg.norm(_colours(*one).mean(0) - _colours(*other).mean(0)))


DISTANCES: dict[str, Callable[[SceneClassifier, ObjectKind, ObjectKind], float]] = {
    "features": feature_distance,
    "histogram": histogram_distance,
    "colour": colour_distance,
}


def summary(told: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for every distance and for references of the same and of another thing, and of all."""
    groups = {
        "all": told,
        "the same thing": [e for e in told if e["same"]],
        "another": [e for e in told if not e["same"]],
    }
    found = []
    for group, some in groups.items():
        for name in DISTANCES if some else ():
            without, with_it, drawn = ([e[side][name] for e in some] for side in ("without", "with", "drawn"))
            gains = [a - b for a, b in zip(without, with_it, strict=True)]
            row = {"reference shows": group, "edits": str(len(some)), "distance": name}
            row |= {"without": f"{median(without):.3g}", "with": f"{median(with_it):.3g}"}
            row |= {"drawn": f"{median(drawn):.3g}", "gain": f"{median(gains):.3g}"}
            row |= {"closer": f"{sum(gain > 0 for gain in gains)} of {len(some)}"}
            shares = {"done without": "without", "done with": "with", "done drawn": "drawn"}
            row |= {said: f"{fmean(e[side]['success'] for e in some):.0%}" for said, side in shares.items()}
            found.append(row | {"exact outside": f"{fmean(e['with']['exact'] for e in some):.0%}"})
    return found


def _told(
    judge: SceneClassifier, edit: ReferenceEdit, source: EditResult, without: EditResult, taken: EditResult
) -> dict[str, Any]:
    old, new = edit.change.prompts
    shown = (edit.reference, edit.shown)
    told: dict[str, Any] = {"source_prompt": old, "prompt": new, "same": edit.same}
    for name, result in (("without", without), ("with", taken)):
        told[name] = distances(judge, (np.asarray(result.image), edit.thing), shown) | {
            "success": edit_succeeded(judge, edit.change, result.image),
            "exact": metrics.equal_outside(result.image, source.image, result.mask.grid),
        }
    drawn = Image.fromarray(edit.painted)
    told["drawn"] = distances(judge, (edit.painted, edit.thing), shown) | {
        "success": edit_succeeded(judge, edit.change, drawn)
    }
    return told


@torch.inference_mode()
def _again(pipe: StableDiffusionPipeline, pixels: Bytes) -> Bytes:
    """A picture [S, S, 3] as the autoencoder decodes it."""
    decoded = pipe.vae.decode(encode(pipe.vae, Image.fromarray(pixels)) / pipe.vae.config.scaling_factor).sample
    again: Bytes = np.array(pipe.image_processor.postprocess(decoded)[0])
    return again


@torch.no_grad()
def _features(judge: SceneClassifier, pixels: Bytes, thing: Mask) -> torch.Tensor:
    """Of a thing alone: [160], mean over where it is."""
    alone = np.where(thing[..., None], pixels, np.uint8(_GREY))
    found = judge.features(torch.from_numpy(alone).permute(2, 0, 1)[None].float() / 127.5 - 1)[0]
    height, width = found.shape[-2:]
    shares = F.adaptive_avg_pool2d(torch.from_numpy(thing)[None, None].float(), (height, width))[0]
    return (found * shares).sum((1, 2)) / shares.sum()


def _colours(pixels: Bytes, thing: Mask) -> Floats:
    """A thing's pixels in CIE Lab, [n, 3]."""
    colours: Floats = rgb2lab(pixels[thing])
    return colours
