"""Variations: several edits of one picture in one run, each with noise of its own. Knows sessions; not gradio."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from secrets import randbelow
from typing import TYPE_CHECKING

from PIL.Image import fromarray

from app.handlers import reference_arguments, region_arguments
from app.runs import RunProgress, RunRequest, stream_run
from app.validation import SEEDS, ReferencePicture, RegionSettings, check_region, clean_prompt
from fisedit.errors import Cancelled, InputError
from fisedit.values import cell_pixels

if TYPE_CHECKING:
    from app.session import Session
    from app.sessions import AppState
    from fisedit import Editor, EditResult
    from fisedit.values import OnStep

COUNT = 4
"""Edits of a run."""


def vary(
    state: AppState,
    session: Session,
    prompt: str,
    region: RegionSettings | None = None,
    reference: ReferencePicture | None = None,
) -> Iterator[RunProgress]:
    """Several edits, each with noise of its own; the last progress has the first of them.

    Where the prompt is the current picture's and nothing is painted, that edit is varied: in its region, beside it.
    Stopped, those that are finished stay.

    Args:
        state: whose worker runs it.
        session: whose current picture is edited.
        prompt: what the picture should show.
        region: where the edits may change the picture; None for the changed words' mask.
        reference: a picture whose appearance the edits take, or None.

    Raises:
        SessionError, InputError, Busy, Cancelled: as in `edit`.
    """
    text, region = clean_prompt(prompt), check_region(region or RegionSettings())
    shown = parent = session.current
    if text == shown.prompt and region.add is None:
        if shown.parent is None:
            raise InputError("change a word or paint first; for another picture of the same words press New picture")
        parent, painted = (
            session.history.find(shown.parent),
            cell_pixels(shown.mask.grid, shown.size, shown.config.crop),
        )
        region = RegionSettings(add=fromarray(painted), only=True, strength=region.strength, quality=region.quality)
    add_reference = reference_arguments(state, reference)

    def job(editor: Editor, on_step: OnStep) -> EditResult:
        made: list[EditResult] = []
        try:
            for i in range(COUNT):
                editor.checkout(parent.id)
                own = replace(region, seed=randbelow(SEEDS[1]))
                arguments = region_arguments(own) | add_reference(editor)
                made.append(editor.edit(text, **arguments, on_step=_part_of(on_step, i)))
        except Cancelled:
            if not made:
                raise
        finally:
            editor.checkout(made[0].id if made else shown.id)
        return made[0]

    return stream_run(state, session, RunRequest(job, COUNT * session.current.config.num_timesteps))


def _part_of(on_step: OnStep, index: int) -> OnStep:
    """What a variation tells, as a part of the whole run."""
    return lambda i, n, picture: on_step(index * n + i, COUNT * n, picture)
