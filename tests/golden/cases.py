"""The cases of the golden set: what each one makes of the demo model, through the public face alone.

`make` runs them and stores what comes out; `test_golden` runs them again and compares. Every case has editors of its
own, so that its outcome does not depend on which others ran before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from fisedit import Editor
from tests.golden import lora
from tests.golden.outcome import Shot, shot_of_map, shot_of_picture, shot_of_preview, shot_of_result

if TYPE_CHECKING:
    from numpy.typing import NDArray

HERE = Path(__file__).parent
INPUTS = HERE / "inputs"

CAT = "a cat and a cake on a beach"
DOG = "a dog and a cake on a beach"
CASTLE = "a dog and a castle on a beach"
RECIPE = {"seed": 7, "guidance_scale": 4.0, "num_inference_steps": 8}
SOURCE = RECIPE | {"width": 128, "height": 128}

Shots = Iterator[tuple[str, Shot]]


@dataclass(frozen=True)
class Bench:
    """What the cases share.

    Args:
        folder: takes files that a case writes, such as a LoRA.
    """

    folder: Path

    @cached_property
    def _home(self) -> Editor:
        return load()

    def editor(self, *, max_recorded_bytes: int | None = None) -> Editor:
        """A new editor over the shared model, which no case may change."""
        return Editor(self._home.pipe, model="demo", max_recorded_bytes=max_recorded_bytes)

    def sourced(self, **options: int | None) -> Editor:
        """A new editor that stands on the common source."""
        editor = self.editor(**options)
        editor.generate(CAT, **SOURCE)
        return editor


def load() -> Editor:
    """An editor with a copy of the demo model of its own."""
    return Editor.from_pretrained("demo", dtype="fp32", device="cpu", local_files_only=True)


def picture(name: str) -> Image.Image:
    """An input picture of the set."""
    with Image.open(INPUTS / name) as image:
        image.load()
        return image


def box(width: int, height: int, *, share: float = 0.5) -> Image.Image:
    """A mask of the lower left part of a picture, so much of each side."""
    levels = np.zeros((height, width), np.uint8)
    levels[round(height * (1 - share)) :, : round(width * share)] = 255
    return Image.fromarray(levels)


def cells(top: int, left: int, side: int) -> NDArray[np.bool_]:
    """A square mask in latent cells of a 128 px picture."""
    grid = np.zeros((16, 16), bool)
    grid[top : top + side, left : left + side] = True
    return grid


def generate(bench: Bench) -> Shots:
    """Sources: sizes, guidance, weighted and negative prompts."""
    editor = bench.editor()
    yield "source", shot_of_result(editor.generate(CAT, **SOURCE))
    yield "wide", shot_of_result(editor.generate("a (cat:1.3) on a beach", **(RECIPE | {"width": 160, "height": 96})))
    yield "unguided", shot_of_result(editor.generate(DOG, **(SOURCE | {"guidance_scale": 1.0})))
    yield "negative", shot_of_result(editor.generate(DOG, negative_prompt="snow", **SOURCE))


def schedulers(bench: Bench) -> Shots:
    """A source and an edit with every sampler but DDIM, which the other cases use."""
    for name in ("dpmsolver++", "euler", "euler_a", "lcm"):
        editor = bench.editor()
        editor.generate(CAT, scheduler=name, **SOURCE)
        yield f"{name.replace('+', 'p')}-edit", shot_of_result(editor.edit(DOG))


def edit_words(bench: Bench) -> Shots:
    """The changed words say where; with and without the check for leaks."""
    yield "verified", shot_of_result(bench.sourced().edit(DOG))
    yield "unverified", shot_of_result(bench.sourced().edit(DOG, verify=False))


def edit_given_mask(bench: Bench) -> Shots:
    """A mask as a picture, as a grid of cells, and with growth of the caller's."""
    editor = bench.sourced()
    source = editor.current.id
    yield "picture", shot_of_result(editor.edit(DOG, mask=box(128, 128)))
    editor.checkout(source)
    yield "cells", shot_of_result(editor.edit(DOG, mask=cells(4, 1, 6), growth=1))
    editor.checkout(source)
    yield "growths", shot_of_result(editor.edit(DOG, mask=cells(4, 1, 6), growth=[64, 2, 2, 1, 1, 1, 0, 0]))


def protect(bench: Bench) -> Shots:
    """An area that stays, in a sparse edit and in one that would change everything."""
    editor = bench.sourced()
    source = editor.current.id
    yield "sparse", shot_of_result(editor.edit(DOG, protect=cells(10, 4, 6)))
    editor.checkout(source)
    yield "global", shot_of_result(editor.edit("a cat and a cake at night", protect=box(128, 128)))


def delete(bench: Bench) -> Shots:
    """A thing that the new prompt leaves out."""
    yield "edit", shot_of_result(bench.sourced().edit("a cat on a beach"))


def insert(bench: Bench) -> Shots:
    """A thing that the new prompt adds: one that finds a place, and one that turns out to change everything."""
    yield "edit", shot_of_result(bench.sourced().edit("a cat and a cake and a balloon on a beach"))
    yield "dense", shot_of_result(bench.sourced().edit("a cat wearing a hat and a cake on a beach"))


def leak(bench: Bench) -> Shots:
    """An edit that leaves its mask, which is grown."""
    yield "edit", shot_of_result(bench.sourced().edit(DOG, grow=-2))


def reweight(bench: Bench) -> Shots:
    """A word that counts more, and a prompt that says the same."""
    editor = bench.sourced()
    yield "edit", shot_of_result(editor.edit("a cat and a (cake:1.4) on a beach"))
    yield "same", shot_of_result(editor.edit("a cat and a (cake:1.4) on a beach"))


def search(bench: Bench) -> Shots:
    """Every other way of finding the mask."""
    editor = bench.sourced()
    source = editor.current.id
    for method, steps in (("cross", None), ("cross-self", None), ("new-words", 2), ("two-way", 2), ("latents", 3)):
        editor.checkout(source)
        yield method, shot_of_result(editor.edit(DOG, mask_method=method, probe_steps=steps))
    editor.checkout(source)
    yield "words", shot_of_result(editor.edit(DOG, words=("cake",), grow=1))
    editor.checkout(source)
    yield "instance", shot_of_result(editor.edit(DOG, mask_method="cross", instance=0, grow=-1))


def structure(bench: Bench) -> Shots:
    """A share of the source's structure is kept."""
    yield "half", shot_of_result(bench.sourced().edit(DOG, structure=0.5))
    yield "whole", shot_of_result(bench.sourced().edit(DOG, structure=1.0, mask=cells(4, 1, 6)))


def strength(bench: Bench) -> Shots:
    """The first steps are the source's."""
    editor = bench.sourced()
    yield "edit", shot_of_result(editor.edit(DOG, strength=0.6))
    yield "next", shot_of_result(editor.edit(CASTLE, strength=0.6, structure=0.5))


def reference(bench: Bench) -> Shots:
    """The look of a picture, for a source, for an edit of it, and for an edit of a plain source."""
    editor = bench.editor()
    editor.load_adapter("demo-look")
    yield "source", shot_of_result(editor.generate(CAT, reference=picture("reference.png"), **SOURCE))
    yield "edit", shot_of_result(editor.edit(DOG))
    editor.generate(CAT, **SOURCE)
    yield "plain", shot_of_result(editor.edit(DOG, reference=picture("reference.png")))


def with_lora(bench: Bench) -> Shots:
    """A LoRA at work, at another scale, and taken out again."""
    editor = load()
    name = editor.load_lora(lora.write(editor.pipe, bench.folder / "golden.safetensors"), scale=0.8)
    yield "source", shot_of_result(editor.generate(CAT, **SOURCE))
    yield "edit", shot_of_result(editor.edit(DOG))
    editor.scale_loras({name: -0.5})
    yield "scaled", shot_of_result(editor.edit(CASTLE))
    editor.unload_lora(name)
    yield "unloaded", shot_of_result(editor.generate(CAT, **SOURCE))


def opened(bench: Bench) -> Shots:
    """Opened pictures whose sides no 8 divides, with both inversions, by mask and by words."""
    for kind in ("ddim", "ddpm"):
        editor = bench.editor()
        photo = editor.open(picture("photo.png"), "a cat", inversion=kind, **RECIPE)
        yield f"{kind}-photo", shot_of_result(photo)
        yield f"{kind}-photo-edit", shot_of_result(editor.edit("a dog", mask=box(*photo.image.size)))
        editor.open(picture("scene.png"), CAT, inversion=kind, **RECIPE)
        yield f"{kind}-scene-edit", shot_of_result(editor.edit(DOG))
        yield f"{kind}-scene-next", shot_of_result(editor.edit(CASTLE, structure=0.3))


def opened_otherwise(bench: Bench) -> Shots:
    """A picture with alpha, a grey one, and one that nobody described."""
    scene = picture("scene.png")
    clear = scene.copy()
    clear.putalpha(box(*scene.size, share=0.7))
    for name, image in (("alpha", clear), ("grey", scene.convert("L"))):
        editor = bench.editor()
        editor.open(image, CAT, **RECIPE)
        yield name, shot_of_result(editor.edit(DOG, mask=box(*scene.size)))
    editor = bench.editor()
    editor.open(scene, width=144, height=120, **RECIPE)
    yield "undescribed", shot_of_result(editor.edit("a cat and a castle", words=("castle",)))


def chain(bench: Bench) -> Shots:
    """Five edits, each of the one before."""
    editor = bench.sourced()
    prompts = (DOG, CASTLE, "a dog and a castle in the snow", "a fox and a castle in the snow", "a fox in the snow")
    for number, prompt in enumerate(prompts, 1):
        yield f"{number}", shot_of_result(editor.edit(prompt))


def branch(bench: Bench) -> Shots:
    """Undo and another edit, redo and an edit, a deleted result and an edit."""
    editor = bench.sourced()
    first = editor.edit(DOG)
    editor.undo()
    yield "other", shot_of_result(editor.edit("a fox and a cake on a beach"))
    editor.checkout(first.id)
    editor.undo()
    editor.redo()
    yield "redone", shot_of_result(editor.edit(CASTLE))
    editor.delete(first.id)
    yield "deleted", shot_of_result(editor.edit("a cat and a tent on a beach"))


def many(bench: Bench) -> Shots:
    """Three edits of one source."""
    prompts = (DOG, "a cat and a castle on a beach", "a fox and a cake on a beach")
    masks = (cells(4, 1, 6), cells(5, 9, 6), cells(3, 0, 7))
    editor = bench.sourced()
    for number, result in enumerate(editor.edit_many(prompts, masks)):
        yield f"{number}", shot_of_result(result)
    yield "next", shot_of_result(editor.edit(DOG))


def rebuilt(bench: Bench) -> Shots:
    """Edits whose source's features are not kept, or were dropped."""
    editor = bench.sourced(max_recorded_bytes=0)
    editor.edit(DOG)
    yield "no-room", shot_of_result(editor.edit(CASTLE))
    editor = bench.sourced()
    editor.edit(DOG)
    editor.forget()
    yield "forgotten", shot_of_result(editor.edit(CASTLE))


def preview(bench: Bench) -> Shots:
    """Mask and cost before anything runs, the attention map, and the dense run of an edit's prompt."""
    editor = bench.sourced()
    yield "words", shot_of_preview(editor.preview(DOG))
    yield "mask", shot_of_preview(editor.preview(DOG, mask=cells(4, 1, 6), strength=0.5))
    yield "global", shot_of_preview(editor.preview("a cat and a cake at night"))
    yield "nothing", shot_of_preview(editor.preview(CAT))
    yield "attention", shot_of_map(editor.attention(DOG))
    yield "dense", shot_of_picture(editor.dense(editor.edit(DOG).id)[0])


def graphs(bench: Bench) -> Shots:
    """The stand-in for captured graphs: a source, edits by words, and what it cannot do."""
    with graphs_wanted():
        editor = bench.editor()
        source = editor.generate(CAT, **SOURCE)
        yield "source", shot_of_result(source)
        yield "words", shot_of_result(editor.edit(DOG))
        yield "next", shot_of_result(editor.edit(CASTLE, strength=0.6))
        editor.checkout(source.id)
        yield "structure", shot_of_result(editor.edit(DOG, structure=0.5))
        editor.checkout(source.id)
        yield "growths", shot_of_result(editor.edit(DOG, mask=cells(4, 1, 6), growth=[64, 2, 2, 1, 1, 1, 0, 0]))
        editor.checkout(source.id)
        yield "leak", shot_of_result(editor.edit(DOG, grow=-2))
        yield "preview", shot_of_preview(editor.preview(CASTLE))


def graphs_many(bench: Bench) -> Shots:
    """Three edits in one batch by the stand-in for captured graphs."""
    with graphs_wanted():
        yield from many(bench)


def graphs_opened(bench: Bench) -> Shots:
    """An edit of an opened picture by the stand-in for captured graphs."""
    with graphs_wanted():
        editor = bench.editor()
        editor.open(picture("scene.png"), CAT, **RECIPE)
        yield "edit", shot_of_result(editor.edit(DOG))


@contextmanager
def graphs_wanted() -> Iterator[None]:
    """Let editors that are made meanwhile use captured graphs, or on a CPU their stand-in."""
    before = os.environ.get("FISEDIT_GRAPHS")
    os.environ["FISEDIT_GRAPHS"] = "1"
    try:
        yield
    finally:
        del os.environ["FISEDIT_GRAPHS"]
        if before is not None:
            os.environ["FISEDIT_GRAPHS"] = before


CASES: dict[str, Callable[[Bench], Shots]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        generate,
        schedulers,
        edit_words,
        edit_given_mask,
        protect,
        delete,
        insert,
        leak,
        reweight,
        search,
        structure,
        strength,
        reference,
        with_lora,
        opened,
        opened_otherwise,
        chain,
        branch,
        many,
        rebuilt,
        preview,
        graphs,
        graphs_many,
        graphs_opened,
    )
}
"""Name -> case; a case yields a named shot for every outcome that is stored."""
