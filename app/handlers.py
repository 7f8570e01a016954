"""The requests of a page or a program, as plain functions over the app's state and a session.

Every argument is checked here: limits are the server's, not the page's. Knows sessions and pictures;
neither gradio nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from app.edit_arguments import condition_arguments, edit_prompt, region_arguments, region_of, source_arguments
from app.runs import RunJob, RunProgress, RunRequest, check_room, part_of, several, stream_run
from app.validation import (
    NO_CONDITIONS,
    Conditions,
    PartNotOpened,
    RegionSettings,
    SourceSettings,
    apply_lora_tags,
    check_count,
    check_extension,
    check_region,
    check_settings,
    clean_prompt,
    decode_picture,
)
from fisedit import Region
from fisedit.errors import InputError
from fisedit.masking.region_arguments import cells_on_picture, covers
from fisedit.storage.canvas import crop_around, needs_crop
from fisedit.values import SEEDS, SchedulerName, num_timesteps

if TYPE_CHECKING:
    from PIL.Image import Image

    from app.session import Session
    from app.sessions import AppState, ModelChoice
    from fisedit import Editor, EditResult
    from fisedit.editor import Preview
    from fisedit.integrations.mask_providers import Detection
    from fisedit.values import Box, OnStep

PREVIEW_TIMEOUT = 1.0
"""Seconds that a preview waits for a run with another model or other LoRAs."""


@dataclass(frozen=True, eq=False)
class EditEstimate:
    """The prediction of an edit.

    Args:
        preview: the editor's.
        seconds: predicted seconds of the edit; None before any run was observed.
        dense_seconds: predicted seconds of a dense run; None before any run was observed.
        size: width and height of the picture.
        crop: the part of it that is on the canvas; None for all of it.
    """

    preview: Preview
    seconds: float | None
    dense_seconds: float | None
    size: tuple[int, int]
    crop: Box | None = None


def generate(
    state: AppState,
    session: Session,
    prompt: str,
    settings: SourceSettings,
    conditions: Conditions = NO_CONDITIONS,
    count: int = 1,
) -> Iterator[RunProgress]:
    """Make a source of a prompt, or several to choose from; the last progress has the first.

    Args:
        state: the app's state, whose worker runs it.
        session: the session that gets the source.
        prompt: what the picture shows.
        settings: how it is made.
        conditions: what adapters read.
        count: number of sources, 1 to 4; each has the seed after that of the one before.

    Raises:
        InputError: an argument out of range, or not offered.
        Busy: the session is at work.
        Cancelled: it was stopped.
    """
    text, settings = apply_lora_tags(prompt, settings)
    text, choice = clean_prompt(text), state.select(check_settings(settings))
    arguments = source_arguments(settings, choice) | {"scheduler": settings.scheduler}
    add_conditions = condition_arguments(state, conditions)

    def make(editor: Editor, i: int, on_step: OnStep) -> EditResult:
        own = arguments | {"seed": min(settings.seed + i, SEEDS[1])}
        return editor.generate(text, **own, **add_conditions(editor), on_step=on_step)

    def make_one(editor: Editor, on_step: OnStep) -> EditResult:
        return make(editor, 0, on_step)

    timesteps = num_timesteps(SchedulerName(settings.scheduler), settings.steps)
    job = make_one if check_count(count) == 1 else several(make, count)
    return stream_run(state, session, RunRequest(job, count * timesteps, choice, results=count))


def open_picture(
    state: AppState,
    session: Session,
    data: bytes,
    prompt: str = "",
    settings: SourceSettings | None = None,
    region: Region | None = None,
) -> Iterator[RunProgress]:
    """Make a source of a picture, which is inverted; the last progress has it.

    Args:
        state: the app's state, whose worker runs it.
        session: the session that gets the source.
        data: the picture's file.
        prompt: what the picture shows, "" where that is not known.
        settings: how it is made; None for the defaults.
        region: region of masks and boxes; None for all of it. Of a large picture the part around it alone is opened.

    Raises:
        InputError: no picture, one too large, or an argument out of range.
        Busy: the session is at work.
        Cancelled: it was stopped.
    """
    picture, settings = decode_picture(data), settings or SourceSettings()
    words, settings = apply_lora_tags(prompt, settings)
    text = None if isinstance(words, str) and not words.strip() else clean_prompt(words)
    choice = state.select(check_settings(settings))
    arguments = source_arguments(settings, choice)

    def job(editor: Editor, on_step: OnStep) -> EditResult:
        return editor.open(picture, text, region=region, **arguments, on_step=on_step)

    return stream_run(state, session, RunRequest(job, settings.steps, choice))


def preview(
    state: AppState,
    session: Session,
    prompt: str,
    region: RegionSettings | None = None,
    conditions: Conditions = NO_CONDITIONS,
) -> EditEstimate:
    """Predict where an edit would change the picture, and its cost. No result is made.

    Args:
        state: the app's state, whose worker runs it.
        session: the session whose current picture would be edited.
        prompt: what the picture should show.
        region: where the edit may change the picture; None for the changed words' mask.
        conditions: what adapters read.

    Raises:
        SessionError: there is no source, or what made it is not offered.
        InputError: an argument out of range. PartNotOpened: the region lies on a part that the edit will open.
        Busy: the session is at work, or a run uses another model or other LoRAs.
    """
    region = check_region(region or RegionSettings())
    text = session.current.prompt if region.regions and not prompt else edit_prompt(state, session, prompt)
    add_conditions = condition_arguments(state, conditions)
    with session.work(stops_live=False):
        choice = state.select_recorded(session, session.current)

        def job() -> Preview:
            session.raise_if_stopped()
            editor = session.editor(state.load(choice))
            if part := part_to_open(editor, region):
                raise PartNotOpened(part)
            where = region_arguments(region) | add_conditions(editor)
            return editor.preview(text, **where, on_step=lambda *_: session.raise_if_stopped())

        waiting = state.worker.submit(job, choice.weights, brief=True)
        found = state.worker.brief_result(waiting, PREVIEW_TIMEOUT)
        session.last_preview, shown = found, session.current
    state.limit_memory()
    return _estimate(found, choice, shown)


def edit(
    state: AppState,
    session: Session,
    prompt: str,
    region: RegionSettings | None = None,
    conditions: Conditions = NO_CONDITIONS,
) -> Iterator[RunProgress]:
    """Change the current picture to fit a prompt; the last progress has the result.

    Args:
        state: the app's state, whose worker runs it.
        session: the session whose current picture is edited.
        prompt: what the picture should show; "" for the current prompt where regions have their own.
        region: where the edit may change the picture; None for the changed words' mask.
        conditions: what adapters read.

    Raises:
        SessionError: there is no source, or what made it is not offered.
        InputError: an argument out of range.
        Busy: the session is at work.
        Cancelled: it was stopped.
    """
    region = check_region(region or RegionSettings())
    text = session.current.prompt if region.regions and not prompt else edit_prompt(state, session, prompt)
    if session.live is not None and session.live.key == edit_key(session, text, region, conditions):
        return _keep_live(session, session.live.result_id)
    return stream_run(state, session, edit_request(state, session, text, region, conditions))


def edit_request(
    state: AppState, session: Session, text: str, region: RegionSettings, conditions: Conditions
) -> RunRequest:
    """The run of an edit of the current picture. Raises SessionError before the first one."""
    add_conditions = condition_arguments(state, conditions)

    def edit_once(editor: Editor, on_step: OnStep) -> EditResult:
        return editor.edit(text, **region_arguments(region), **add_conditions(editor), on_step=on_step)

    return RunRequest(on_its_part(region, edit_once), session.current.config.num_timesteps)


def on_its_part(region: RegionSettings, job: RunJob, runs: int = 1) -> RunJob:
    """A job that first opens the part around a region of a large opened picture, unless it is open.

    Args:
        region: the region that the job edits.
        job: called with an editor and an `on_step`.
        runs: number of runs of the job, each as long as opening the part.
    """

    def job_on_part(editor: Editor, on_step: OnStep) -> EditResult | Sequence[EditResult] | float:
        if not part_to_open(editor, region):
            return job(editor, on_step)
        check_room(editor.history, 1 + runs)
        with editor.transaction():
            _open_part(editor, region, part_of(lambda i, n, _: on_step(i, n, None), 0, 1 + runs))
            return job(editor, lambda i, n, picture: on_step(n // runs + i, n // runs + n, picture))

    return job_on_part


def part_to_open(editor: Editor, region: RegionSettings) -> Box | None:
    """Return the part of the current picture that an edit of a region opens first; None where it is open already."""
    now, marked = editor.current, _marked(region)
    if marked is None or not now.config.opened or not needs_crop(now.size, editor.native_size):
        return None
    opened, grid = now.config.crop or (0, 0, *now.size), cells_on_picture(marked, now.size)
    if not grid.any() or (now.config.crop is not None and covers(opened, marked, now.size)):
        return None
    part = crop_around(grid, now.size, editor.native_size)
    return None if part == opened else part


def _marked(region: RegionSettings) -> Region | None:
    """Return the marked region of a picture; None where words say where."""
    if region.regions:
        found = Region.union(each for each, _ in region.regions)
    else:
        found = region.marked or region.region or Region.words()
    return None if found.reads_attention else found


def _open_part(editor: Editor, region: RegionSettings, on_step: OnStep) -> None:
    """Open the current picture by a region, with the settings that it has."""
    now, config = editor.current, editor.current.config
    editor.open(
        now.image,
        now.prompt or None,
        region=_marked(region),
        seed=config.seed,
        inversion=str(config.inversion),
        negative_prompt=config.negative_prompt,
        num_inference_steps=config.num_inference_steps,
        guidance_scale=config.guidance_scale,
        clip_skip=config.clip_skip,
        negative_clip_skip=config.negative_clip_skip,
        sizes=config.sizes,
        on_step=on_step,
    )


def find_things(state: AppState, session: Session) -> tuple[Detection, ...]:
    """Detect objects in the current picture with the app's detector, from left to right; the session keeps them.

    Raises:
        MaskError: it failed. InputError: there is no detector.
    """
    from fisedit.integrations.mask_providers import find  # loads torch

    if state.pool.detector is None:
        raise InputError("there is no detector; start the app with --detector")
    current, detector = session.current, state.pool.detector
    found = state.worker.call(lambda: tuple(find(detector, current.image)), brief=True)
    session.detections = current.id, found
    return found


def edit_key(session: Session, text: str, region: RegionSettings, conditions: Conditions) -> object:
    """Return a key of an edit; equal for equal edits of one picture."""
    painted = tuple(
        picture and (picture.mode, picture.size, picture.tobytes()) for picture in (region.add, region.protect)
    )
    chosen = [getattr(region, each.name) for each in fields(region) if each.name not in ("add", "protect", "found")]
    return session.current.id, text, chosen, painted, conditions


def _keep_live(session: Session, result_id: str) -> Iterator[RunProgress]:
    """Make the live edit the current picture, as if it had been run."""
    with session.work():
        result, session.live = session.history.checkout(result_id), None
        session.set_candidates(kept=result)
        session.save_or_say()
    yield RunProgress(1, 1, 0.0, result=result)


def erase(state: AppState, session: Session, region: RegionSettings) -> Iterator[RunProgress]:
    """Let what is around a painted area grow into it; the last progress has the result.

    Args:
        state: the app's state, whose worker runs it.
        session: the session whose current picture is edited.
        region: what goes, painted or by words.

    Raises:
        SessionError, InputError, Busy, Cancelled: as in `edit`.
    """
    region = check_region(region)
    if region.marked is None and region.region is None and not region.words:
        raise InputError("pick or paint what shall go, or choose its word under Region; nothing is marked")
    marked = region_of(replace(region, only=region.marked is not None and not region.words))

    def erase_once(editor: Editor, on_step: OnStep) -> EditResult:
        return editor.erase(marked, quality=region.quality, seed=region.seed, on_step=on_step)

    job = on_its_part(region, erase_once)
    return stream_run(state, session, RunRequest(job, session.current.config.num_timesteps))


def extend(
    state: AppState,
    session: Session,
    widths: tuple[int, int, int, int],
    prompt: str,
    region: RegionSettings | None = None,
) -> Iterator[RunProgress]:
    """Make the current picture larger and paint what is added; the last progress has the result.

    Args:
        state: the app's state, whose worker runs it.
        session: the session whose current picture is extended.
        widths: pixels at the left, top, right and bottom, 0 to 1024.
        prompt: what the larger picture shows.
        region: settings of which quality and seed count; None for the usual ones.

    Raises:
        SessionError, InputError, Busy, Cancelled: as in `edit`.
    """
    region = check_region(region or RegionSettings())
    text, sides = edit_prompt(state, session, prompt), check_extension(widths, session.current.size)
    seeds = {} if region.seed is None else {"seed": region.seed}

    def job(editor: Editor, on_step: OnStep) -> EditResult:
        return editor.extend(*sides, prompt=text, quality=region.quality, on_step=_half_of(on_step), **seeds)

    return stream_run(state, session, RunRequest(job, 2 * session.current.config.num_timesteps, results=2))


def _half_of(on_step: OnStep) -> OnStep:
    """Return an `OnStep` that tells two runs, one after the other, as halves of one.

    It drops previews, which are of another size.
    """
    before: list[int] = []

    def tell(i: int, n: int, _: Image | None) -> None:
        if i == 0:
            before.append(i)
        on_step(i + n * (len(before) > 1), 2 * n, None)

    return tell


def measure_dense(state: AppState, session: Session, result_id: str) -> Iterator[RunProgress]:
    """Run a result's config densely, to compare; the last progress has the seconds that it took.

    Args:
        state: the app's state, whose worker runs it.
        session: the session that has the result.
        result_id: id of any result.

    Raises:
        SessionError: there is no such result, or what made it is not offered.
        Busy: the session is at work.
        Cancelled: it was stopped.
    """
    result = session.history.find(result_id)
    choice = state.select_recorded(session, result)

    def job(editor: Editor, on_step: OnStep) -> float:
        session.measured[result_id] = editor.dense(result_id, on_step)[1]
        return session.measured[result_id]

    return stream_run(state, session, RunRequest(job, result.config.num_timesteps, choice))


def _estimate(preview: Preview, choice: ModelChoice, shown: EditResult) -> EditEstimate:
    place = shown.size, shown.config.crop
    if preview.seconds is not None and preview.seconds_dense is not None:  # by this machine's cost table
        return EditEstimate(preview, preview.seconds, preview.seconds_dense, *place)
    estimator = choice.model.estimator
    dense = estimator.dense_seconds(preview.macs_dense)
    seconds = dense if preview.fallback else estimator.sparse_seconds(preview.macs, preview.macs_dense)
    return EditEstimate(preview, 0.0 if preview.nothing else seconds, dense, *place)
