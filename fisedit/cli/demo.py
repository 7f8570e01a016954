"""The demonstration: a picture, two edits by changed words, proof that nothing else moved, and what it cost.

Uses the public face alone, as any program could.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fisedit.storage import files, images
from fisedit.storage.contact_sheet import make_sheet, overlay

if TYPE_CHECKING:
    from fisedit import Editor, EditResult
    from fisedit.storage.image_metadata import Metadata
    from fisedit.values import OnStep

STORY = ("a cat and a cake on a beach", "a dog and a cake on a beach", "a dog and a castle on a beach")
"""The source's prompt, and the edits' made one on the other."""

GUIDANCE = 4.0
"""What suits the demo model: more of it makes a model this small draw worse."""


@dataclass(frozen=True)
class Demo:
    """A told trajectory.

    Args:
        results: the source, then one result per edit.
        moved: per edit, how many pixels differ outside its mask; zeros, or the engine is wrong.
    """

    results: tuple[EditResult, ...]
    moved: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether every pixel outside every mask kept its bytes."""
        return not any(self.moved)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        rows = [{"prompt": result.prompt, **result.stats.as_dict()} for result in self.results]
        return {"identical_outside": self.passed, "pixels_moved_outside": self.moved, "results": rows}


def tell(editor: Editor, on_step: OnStep | None = None, **config: Any) -> Demo:
    """Generate the trajectory's source and edit it, each edit on the one before.

    Args:
        editor: with a model that knows the trajectory's words.
        on_step: told of every step.
        config: the other arguments of `Editor.generate`, such as `seed`.
    """
    source = editor.generate(STORY[0], on_step=on_step, guidance_scale=GUIDANCE, **config)
    results = (source, *(editor.edit(prompt, on_step=on_step) for prompt in STORY[1:]))
    return Demo(results, tuple(moved_outside(before, after) for before, after in pairwise(results)))


def moved_outside(before: EditResult, after: EditResult) -> int:
    """Count the pixels outside `after`'s mask that differ from `before`'s."""
    outside = np.asarray(after.mask.image()) == 0
    changed = (np.asarray(before.image) != np.asarray(after.image)).any(axis=-1)
    return int((changed & outside).sum())


def write(demo: Demo, folder: Path, made: Callable[[EditResult], Metadata | None]) -> list[Path]:
    """Write a told trajectory's pictures, sheet and figures into `folder`.

    Args:
        made: what a result's picture tells of its making.

    Returns:
        The files, the sheet first.
    """
    source = demo.results[0]
    columns = [(f"source: {source.prompt}", source.image)]
    pictures, told = {"0-source.png": source.image}, {"0-source.png": made(source)}
    for number, (before, after) in enumerate(pairwise(demo.results), 1):
        where = overlay(before.image, after.mask.image())
        pictures |= {f"{number}-mask.png": where, f"{number}-edit.png": after.image}
        told |= {f"{number}-edit.png": made(after)}
        columns += [(f"{after.diff}: {after.mask.area:.0%} may change", where), (after.prompt, after.image)]
    pictures = {"sheet.png": make_sheet(columns)} | pictures
    for name, picture in pictures.items():
        images.write_image(picture, folder / name, told.get(name))
    files.write_json(demo.as_dict(), folder / "report.json")
    return [folder / name for name in (*pictures, "report.json")]
