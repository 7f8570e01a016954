"""The demo: an image, two edits by changed words, a check that nothing else changed, and the costs.

Uses the public face only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisedit.storage import files, images
from fisedit.storage.contact_sheet import make_sheet, overlay

if TYPE_CHECKING:
    from fisedit import Editor, EditResult
    from fisedit.metadata.image_metadata import Metadata
    from fisedit.values import OnStep

PROMPTS = ("a cat and a cake on a beach", "a dog and a cake on a beach", "a dog and a castle on a beach")
"""The source's prompt, and those of the edits, each of the result before it."""

GUIDANCE = 4.0
"""Guidance scale for the demo model; more makes images of so small a model worse."""


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo.

    Args:
        results: The source, then one result per edit.
        changed_outside: Number of pixels that differ outside the mask, per edit; 0 if the engine is correct.
    """

    results: tuple[EditResult, ...]
    changed_outside: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """True if every pixel outside every mask is unchanged."""
        return not any(self.changed_outside)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        rows = [{"prompt": result.prompt, **result.stats.as_dict()} for result in self.results]
        return {"identical_outside": self.passed, "pixels_moved_outside": self.changed_outside, "results": rows}


def run_demo(editor: Editor, on_step: OnStep | None = None, **config: Any) -> DemoResult:
    """Generate the source and edit it, each edit of the result before it.

    Args:
        editor: Its model should know the words of `PROMPTS`.
        on_step: Called after every step.
        config: Further arguments of `Editor.generate`, such as `seed`.
    """
    source = editor.generate(PROMPTS[0], on_step=on_step, guidance_scale=GUIDANCE, **config)
    results = (source, *(editor.edit(prompt, on_step=on_step) for prompt in PROMPTS[1:]))
    return DemoResult(results, tuple(after.changed_outside(before) for before, after in pairwise(results)))


def write_demo(demo: DemoResult, folder: Path, metadata_of: Callable[[EditResult], Metadata | None]) -> list[Path]:
    """Write the images, a sheet of them and the figures.

    Args:
        demo: The results.
        folder: The output folder, created if missing.
        metadata_of: Metadata of a result's image file, or None.

    Returns:
        The files, the sheet first.
    """
    source = demo.results[0]
    columns = [(f"source: {source.prompt}", source.image)]
    pictures, metadata = {"0-source.png": source.image}, {"0-source.png": metadata_of(source)}
    for number, (before, after) in enumerate(pairwise(demo.results), 1):
        masked = overlay(before.image, after.mask.image())
        pictures |= {f"{number}-mask.png": masked, f"{number}-edit.png": after.image}
        metadata |= {f"{number}-edit.png": metadata_of(after)}
        columns += [(f"{after.diff}: {after.mask.area:.0%} may change", masked), (after.prompt, after.image)]
    pictures = {"sheet.png": make_sheet(columns)} | pictures
    for name, picture in pictures.items():
        images.write_image(picture, folder / name, metadata.get(name))
    files.write_json(demo.as_dict(), folder / "report.json")
    return [folder / name for name in (*pictures, "report.json")]
