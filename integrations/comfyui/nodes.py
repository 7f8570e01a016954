"""The nodes: their inputs, their outputs, and what each asks of an editor.

They follow ComfyUI's first schema (`INPUT_TYPES`, `RETURN_TYPES`, `FUNCTION`), which every version of it reads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fisedit import EditResult, Region
from fisedit.errors import InputError, SessionError
from fisedit.storage.contact_sheet import overlay
from fisedit.values import OnStep, Quality, SchedulerName, dense_run_as_text

from . import models
from .sessions import NodeSession, PictureBatch, progress
from .tensors import digest, to_image, to_masks, to_pictures

NODE_CLASS_MAPPINGS: dict[str, type] = {}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}
Inputs = dict[str, Any]
Outputs = tuple[Any, ...]
Function = Callable[..., Outputs]


def text(tooltip: str) -> Outputs:
    """An input for a prompt."""
    return "STRING", {"multiline": True, "dynamicPrompts": True, "default": "", "tooltip": tooltip}


def whole(default: int, least: int, most: int, tooltip: str, **more: Any) -> Outputs:
    """An input for a whole number."""
    return "INT", {"default": default, "min": least, "max": most, "tooltip": tooltip, **more}


def real(default: float, most: float, tooltip: str) -> Outputs:
    """An input for a number from 0 on."""
    return "FLOAT", {"default": default, "min": 0.0, "max": most, "step": 0.05, "round": 0.01, "tooltip": tooltip}


SETTINGS = {
    "negative_prompt": text("What the picture should not show."),
    "steps": whole(25, 1, 999, "The number of steps."),
    "cfg": real(7.5, 100.0, "Guidance: how closely the prompt is followed."),
}
PICTURE = {"picture": ("FISEDIT_PICTURE", {"tooltip": "The picture to begin at. Its other edits make no difference."})}
PROMPT = {"prompt": text("What the picture shows after the edit.")}
QUALITY = {"quality": ([each.value for each in Quality], {"default": "balanced", "tooltip": "Nearness to a full run."})}
WHERE = {
    "mask": ("MASK", {"tooltip": "White where the picture may change; without it, where the changed words mean."}),
    "words": ("STRING", {"default": "", "tooltip": "Words that say where; with a mask, inside it."}),
}
VARIATION = {"variation": whole(0, 0, 2**63 - 1, "0 keeps the picture's noise; another number is a seed.")}
MADE = {"picture": "FISEDIT_PICTURE", "image": "IMAGE", "text": "STRING"}


def node(
    title: str, outputs: dict[str, str], required: Any, optional: Inputs | None = None, **more: Any
) -> Callable[[Function], Function]:
    """Register a function as a node that its docstring describes.

    Args:
        title: its name in menus.
        outputs: their names -> their types.
        required: the inputs that it needs, or what returns them.
        optional: the other inputs.
        more: further attributes of the node's class; `keeps=True` tells the function the id of its node.
    """
    hidden = {"node_id": "UNIQUE_ID"} if more.pop("keeps", False) else {}

    def register(run: Function) -> Function:
        def input_types() -> dict[str, Inputs]:
            return {
                "required": required() if callable(required) else required,
                "optional": optional or {},
                "hidden": hidden,
            }

        name = "FisEdit" + title.title().replace(" ", "")
        made = {"RETURN_TYPES": tuple(outputs.values()), "RETURN_NAMES": tuple(outputs), "DESCRIPTION": run.__doc__}
        body = {"CATEGORY": "fisedit", "FUNCTION": "run", "run": run, "INPUT_TYPES": input_types, **more}
        attributes = {key: staticmethod(value) if callable(value) else value for key, value in (made | body).items()}
        NODE_CLASS_MAPPINGS[name] = type(name, (), attributes)
        NODE_DISPLAY_NAME_MAPPINGS[name] = f"{title} (fisedit)"
        return run

    return register


@node(
    "Load model",
    {"model": "FISEDIT_MODEL"},
    lambda: {"model": (models.names(), {"tooltip": "A checkpoint, a folder of diffusers, or the demo model."})},
    {"device": (["default", "cpu"], {"advanced": True, "tooltip": "ComfyUI's own device, or the CPU."})},
    IS_CHANGED=lambda model, **_: " ".join(models.path_and_state(model)),
)
def load_model(model: str, device: str = "default") -> Outputs:
    """Load a model of Stable Diffusion 1.x, 2.x or XL for edits. The one that was loaded last stays in memory."""
    return (models.load(model, device),)


@node(
    "Source from words",
    MADE,
    {
        "model": ("FISEDIT_MODEL",),
        "prompt": text("What the picture shows."),
        **SETTINGS,
        "seed": whole(0, 0, 2**63 - 1, "The seed of the noise.", control_after_generate=True),
        "sampler": ([name.label for name in SchedulerName], {"default": "DDIM"}),
        "width": whole(0, 0, 2048, "Pixels, divisible by 8; 0 for the model's own.", step=8),
        "height": whole(0, 0, 2048, "Pixels, divisible by 8; 0 for the model's own.", step=8),
        "batch_size": whole(1, 1, 64, "The number of pictures, with the seed, the next one, and so on."),
    },
    keeps=True,
)
def source_from_words(model: NodeSession, node_id: str, **given: Any) -> Outputs:
    """Make a picture from words, with all that later edits need of it."""

    def make(i: int, on_step: OnStep) -> EditResult:
        sides = {side: given[side] or None for side in ("width", "height")}
        named = {"scheduler": given["sampler"], "seed": given["seed"] + i, **sides, **_settings(given)}
        return model.editor.generate(given["prompt"], on_step=on_step, **named)

    return _outputs(model.source(node_id, frozenset(given.items()), make, given["batch_size"]))


@node(
    "Source from image",
    MADE,
    {
        "model": ("FISEDIT_MODEL",),
        "image": ("IMAGE", {"tooltip": "One picture, or a batch."}),
        "prompt": text("What the picture shows, in a few words; empty where that is not known."),
        **SETTINGS,
    },
    {"mask": ("MASK", {"tooltip": "Where edits will be: of a large picture that part alone is painted."})},
    keeps=True,
)
def source_from_image(
    model: NodeSession, node_id: str, image: Tensor, mask: Tensor | None = None, **given: Any
) -> Outputs:
    """Open a picture for edits. Pixels that no edit changes keep their exact values."""
    pictures, shown = to_pictures(image), given["prompt"].strip() or None
    regions = _regions(mask, "", len(pictures))

    def make(i: int, on_step: OnStep) -> EditResult:
        return model.editor.open(pictures[i], shown, region=regions[i], on_step=on_step, **_settings(given))

    asked = digest(image), digest(mask), frozenset(given.items())
    return _outputs(model.source(node_id, asked, make, len(pictures), image))


@node(
    "Preview region",
    {"overlay": "IMAGE", "mask": "MASK", "text": "STRING"},
    PICTURE | PROMPT | QUALITY,
    WHERE,
)
def preview_region(
    picture: PictureBatch, prompt: str, quality: str, mask: Tensor | None = None, words: str = ""
) -> Outputs:
    """Show where an edit would paint and what it would take, before it runs."""
    editor, count, drawn, inside, texts = picture.session.editor, len(picture.results), [], [], []
    for i, region in enumerate(_regions(mask, words, count)):
        result = editor.checkout(picture.results[i].id)
        found = editor.preview(prompt, region=region, quality=quality, on_step=progress(i, count))
        inside.append(to_image(found.mask.shares(result.size, result.config.crop)))
        drawn.append(to_image(overlay(result.image, to_pictures(inside[-1])[0])))
        where = f"{found.mask.area:.0%} of the picture, confidence {found.confidence:.0%}"
        where = f"{dense_run_as_text(found.mask)}: {found.fallback}" if found.fallback else where
        where = f"nothing would change: {found.nothing}" if found.nothing else where
        seconds = "" if found.seconds is None else f"about {found.seconds:.1f} s"
        texts.append(_joined(where, seconds, _work(found.macs_dense, found.macs), *found.notes))
    return torch.cat(drawn), torch.cat(inside)[..., 0], "\n".join(texts)


@node(
    "Edit",
    MADE | {"mask": "MASK"},
    PICTURE | PROMPT | QUALITY,
    WHERE | VARIATION | {"strength": real(1.0, 1.0, "The share of the steps that run; less keeps more of the layout.")},
    keeps=True,
)
def edit(picture: PictureBatch, prompt: str, strength: float = 1.0, **given: Any) -> Outputs:
    """Change words, and what they mean changes in the picture; every other pixel stays."""
    return _edited(
        picture, partial(picture.session.editor.edit, prompt, strength=strength), (prompt, strength), **given
    )


@node("Erase", MADE | {"mask": "MASK"}, PICTURE | QUALITY, WHERE | VARIATION, keeps=True)
def erase(picture: PictureBatch, **given: Any) -> Outputs:
    """Remove what a mask covers, or what words name; its surroundings are painted there."""
    if None in _regions(given.get("mask"), given.get("words", ""), len(picture.results)):
        raise InputError("erase needs a mask or words, got neither; paint what shall go, or name it")
    return _edited(picture, picture.session.editor.erase, (), **given)


@node(
    "Undo",
    {"picture": "FISEDIT_PICTURE", "image": "IMAGE"},
    PICTURE | {"edits": whole(1, 1, 99, "The number of edits to undo.")},
)
def undo(picture: PictureBatch, edits: int) -> Outputs:
    """Go back to what a picture was edited from."""
    for undone in range(edits):
        if picture.parent is None:
            raise SessionError(f"edits must be at most {undone}, as many as the picture has, got {edits}")
        picture = picture.parent
    return picture, picture.images


@node("Compare", {"before": "IMAGE", "full_run": "IMAGE", "changed": "MASK", "text": "STRING"}, PICTURE)
def compare(picture: PictureBatch) -> Outputs:
    """Run an edit's prompt in full, and tell how much less the edit took and which pixels it changed."""
    if picture.parent is None:
        raise SessionError("compare needs an edit, got a source; put it behind Edit or Erase")
    full_runs, texts = [], []
    for i, (result, before) in enumerate(zip(picture.results, picture.parent.results, strict=True)):
        image, seconds = picture.session.editor.dense(result.id, progress(i, len(picture.results)))
        full_runs.append(to_image(image))
        outside = f"{result.changed_outside(before)} pixels changed outside the mask"
        texts.append(_joined(_cost(result), f"a full run took {seconds:.1f} s", outside))
    changed = (picture.images != picture.parent.images).any(-1).float()
    return picture.parent.images, torch.cat(full_runs), changed, "\n".join(texts)


def _settings(given: Inputs) -> Inputs:
    """The settings of a source by the editor's names."""
    names = {"negative_prompt": "negative_prompt", "num_inference_steps": "steps", "guidance_scale": "cfg"}
    return {ours: given[name] for ours, name in names.items()}


def _regions(mask: Tensor | None, words: str, count: int) -> list[Region | None]:
    """The regions of `count` pictures, by a mask, words between commas or spaces, or both; None by neither."""
    named = words.replace(",", " ").split()
    by_words = Region.words(*named) if named else None
    by_masks = [None if each is None else Region.mask(each) for each in to_masks(mask, count)]
    return [each & by_words if each and by_words else each or by_words for each in by_masks]


def _edited(
    picture: PictureBatch,
    run: Callable[..., EditResult],
    asked: Outputs,
    *,
    node_id: str,
    quality: str,
    mask: Tensor | None = None,
    words: str = "",
    variation: int = 0,
) -> Outputs:
    """Edits of all pictures of a batch, made or kept."""
    regions = _regions(mask, words, len(picture.results))

    def make(i: int, on_step: OnStep) -> EditResult:
        return run(region=regions[i], quality=quality, seed=variation + i if variation else None, on_step=on_step)

    return _outputs(picture.session.edit(node_id, (asked, quality, digest(mask), words, variation), make, picture))


def _outputs(made: PictureBatch) -> Outputs:
    """The outputs of a node that makes pictures; a source has no mask."""
    texts = [_joined(_cost(result), result.stats.fallback, *result.stats.notes) for result in made.results]
    found = (made, made.images, "\n".join(texts))
    shares = [to_image(result.mask.shares(result.size, result.config.crop)) for result in made.results]
    return found if made.parent is None else (*found, torch.cat(shares)[..., 0])


def _cost(result: EditResult) -> str:
    return _joined(f"{result.stats.seconds['total']:.1f} s", _work(result.stats.macs_dense, result.stats.macs))


def _work(full: int, spent: int) -> str:
    """Return how much less arithmetic an edit is than a full run; "" if it is no less."""
    return f"{full / spent:.1f} times less arithmetic than a full run" if spent and full > 1.05 * spent else ""


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))
