"""`fisedit bench fidelity`: how close a sparse edit comes to the dense blended one, and which growth is worth its cost.

The reference is diffusers' own pipeline on the new prompt with the same seed, its latents outside the mask replaced by
the source's after every step. PSNR is taken over the pixels inside the mask alone. Masks are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice, permutations
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fisedit.editor import Editor
from fisedit.history import EditResult
from fisedit.values import OnStep

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.values import BoolGrid

THINGS = "cat dog fox panda frog lion cake pumpkin car castle".split()
PLACES = ("on a beach", "in the snow", "on the grass", "at sunset")
AREA = 0.19
"""Share of the picture that the given square masks cover."""

SCHEDULES: dict[str, tuple[int, ...]] = {
    "default": (),
    "0": (0,),
    "1": (1,),
    "2": (2,),
    "3": (3,),
    "4": (4,),
    "3 then 1": (3, 1),
    "1 then 3": (1, 3),
    "1 then 4": (1, 4),
    "2 then 4": (2, 4),
}
"""Growth in latent cells; two numbers are for the first and the second half of the steps."""


def run(
    *,
    model: str = "demo",
    edits: int = 40,
    num_inference_steps: int = 25,
    guidance_scale: float = 4.0,
    device: str | None = None,
    dtype: str | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Edit as many pictures with every growth schedule.

    Args:
        model: as in `fisedit.models.load`; the prompts name what the demo model can draw.
        edits: how many word swaps. guidance_scale: 4, which suits the demo model.
        on_step: called before every edit with (i, n, None).

    Returns:
        {"settings", "rows", "values"}: per schedule the median, tenth percentile and worst PSNR in dB, and the share of
        dense multiply-accumulates; "values" lists the default's PSNR of every edit.
    """
    editor = Editor.from_pretrained(model, device=device, dtype=dtype)
    psnr: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    share: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for i, (prompt, changed) in enumerate(swaps(edits)):
        if on_step is not None:
            on_step(i, edits, None)
        asked: dict[str, Any] = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale}
        source = editor.generate(prompt, seed=1000 + i, **asked)
        grid = place(editor, changed)
        reference = dense_blended(editor, source, changed, grid)
        for name, halves in SCHEDULES.items():
            editor.checkout(source.id)
            result = editor.edit(changed, mask=grid, growth=spread(halves, num_inference_steps))
            psnr[name].append(inside_psnr(result.image, reference, grid))
            share[name].append(result.stats.macs / result.stats.macs_dense)
    rows = [_row(name, psnr[name], share[name]) for name in SCHEDULES]
    settings = {"model": model, "edits": edits, "num_inference_steps": num_inference_steps, "mask_area": AREA}
    dtype = str(editor.pipe.unet.dtype).removeprefix("torch.")
    settings |= {"dtype": dtype, "guidance_scale": guidance_scale, "scheduler": "ddim"}
    return {"settings": settings, "rows": rows, "values": psnr["default"]}


def swaps(count: int) -> list[tuple[str, str]]:
    """Prompt pairs that differ in one thing: "a cat and a cake on a beach" -> "a dog and a cake on a beach"."""
    triples = permutations(THINGS, 3)
    step = len(THINGS) * (len(THINGS) - 1) * (len(THINGS) - 2) // count
    chosen = zip(islice(triples, 0, None, max(1, step)), cycle(PLACES), strict=False)
    pairs = [(f"a {old} and a {kept} {where}", f"a {new} and a {kept} {where}") for (old, kept, new), where in chosen]
    return pairs[:count]


def place(editor: Editor, changed: str) -> BoolGrid:
    """A square mask of `AREA` where the edit's words attend most."""
    heat = editor.attention(changed)
    height, width = heat.shape
    edge = max(1, round((AREA * height * width) ** 0.5))
    sums = np.lib.stride_tricks.sliding_window_view(heat, (edge, edge)).sum((2, 3))
    top, left = np.unravel_index(sums.argmax(), sums.shape)
    grid = np.zeros(heat.shape, bool)
    grid[top : top + edge, left : left + edge] = True
    return grid


def dense_blended(editor: Editor, source: EditResult, prompt: str, grid: BoolGrid) -> Image:
    """The reference picture, by diffusers' pipeline and a callback."""
    recipe, pipe = source.recipe, editor.pipe
    asked: dict[str, Any] = {
        "negative_prompt": recipe.negative_prompt,
        "num_inference_steps": recipe.num_inference_steps,
        "guidance_scale": recipe.guidance_scale,
        "width": recipe.width,
        "height": recipe.height,
    }
    kept: list[Tensor] = []
    inside = torch.from_numpy(grid).to(pipe.unet.device)

    def keep(_: Any, __: int, ___: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        kept.append(state["latents"])
        return state

    def blend(_: Any, i: int, __: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {"latents": torch.where(inside, state["latents"], kept[i])}

    for text, hook in ((recipe.prompt, keep), (prompt, blend)):
        generator = torch.Generator().manual_seed(recipe.seed)
        picture: Image = pipe(text, generator=generator, callback_on_step_end=hook, **asked).images[0]
    return picture


def inside_psnr(got: Image, expected: Image, grid: BoolGrid) -> float:
    """Peak signal to noise ratio in dB over the pixels inside the mask."""
    mask = np.kron(grid, np.ones((8, 8), bool))
    a, b = (np.asarray(picture, np.float64)[mask] for picture in (got, expected))
    return float(10 * np.log10(255**2 / max(float(np.mean((a - b) ** 2)), 1e-10)))


def spread(halves: Sequence[int], steps: int) -> tuple[int, ...] | None:
    """One growth per step from one or two numbers; None, the default, from none."""
    if not halves:
        return None
    first = ceil(steps / 2)
    return (halves[0],) * first + (halves[-1],) * (steps - first)


def _row(name: str, psnr: list[float], share: list[float]) -> dict[str, Any]:
    return {
        "growth": name,
        "psnr_median": float(np.median(psnr)),
        "psnr_p10": float(np.percentile(psnr, 10)),
        "psnr_min": float(np.min(psnr)),
        "macs_ratio": len(share) / sum(share),
    }
