"""`python -m benchmarks.tiers`: edits over features that do not fit in memory, or come from a saved session.

One source is made and saved with its features. Every editor loads that session, so that all edit the same picture, and
their edits take turns. "Warm": pages are in the operating system's cache, for which the machine has memory left;
"cold": they were dropped from it before the edit.
"""

from __future__ import annotations

import os
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisedit.bench.timing import interval, interval_text, measure_seconds, ratio
from fisedit.bench.workload import PROMPTS, load_workload, square_mask
from fisedit.editor import Editor
from fisedit.machine.malloc import keep_freed_memory
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from fisedit.bench.settings import SpeedSettings
    from fisedit.values import OnStep

Row = dict[str, Any]

AREAS = (0.05, 0.01)
"""Shares of the picture that the masks cover; the first is that of the budgets' edits."""

IN_MEMORY = "in memory"

BUDGETS = {IN_MEMORY: None, "1 GB": 10**9, "nothing": 0}
"""Name of the part of the source's features that stays in memory -> bytes; None for half of what is free."""

LONG_RUN = 50
"""Steps of the run whose memory is measured."""

_MODEL = "measured"  # the name of the model in the session, which editors that have it may load


def measure_record_tiers(settings: SpeedSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Measure edits whose source lies in memory, on disk, or in a session.

    Args:
        settings: model, size, steps and turns.
        on_step: called before every turn with (i, n, None).

    Returns:
        {"settings", "rows", "summary", "memory", "notes"}, ready for JSON.

    Raises:
        InputError: the device is not on this machine. ModelError: the model cannot be loaded.
    """
    keep_freed_memory()
    progress, runs = on_step or (lambda *_: None), settings.repeats + 2
    workload = load_workload(settings)
    source = Editor(workload.pipe, model=_MODEL)
    made = measure_seconds(partial(_generate, source, settings, settings.num_inference_steps))
    stats = source.current.stats
    with tempfile.TemporaryDirectory() as name:
        source.save(name, features=True)
        source.forget()
        session = _Session(workload.pipe, Path(name), settings)
        for turn in range(settings.repeats + 1):  # the first one warms up
            progress(turn, runs, None)
            session.take_turns()
        identical = all(len(pictures) == 1 for pictures in session.pictures.values())
        turns = {run: seconds[1:] for run, seconds in session.seconds.items()}
        del session
    progress(runs - 1, runs, None)
    rows = [_row(*run, seconds, turns[IN_MEMORY, run[1]], made) for run, seconds in turns.items()]
    return {
        "settings": {
            "size": settings.size,
            "num_inference_steps": settings.num_inference_steps,
            "guidance_scale": settings.guidance_scale,
            "areas": AREAS,
            "dtype": str(workload.dtype).removeprefix("torch."),
            "repeats": settings.repeats,
            "source_seconds": made,
            "source_bytes": stats.recorded_bytes,
            "identical": identical,
        },
        "rows": rows,
        "summary": [_summary_row(row) for row in rows],
        "memory": [_long_run(workload.pipe, settings)],
        "notes": [] if identical else ["the pictures of the runs are not the same"],
    }


class _Session:
    """Editors of one saved source, by what of it they keep in memory.

    Args:
        pipe: the model.
        folder: The folder of the session.
        settings: The settings of the benchmark.

    Attributes:
        seconds: The seconds of every run and area by turn.
        pictures: all pictures that edits gave, by area.
    """

    def __init__(self, pipe: StableDiffusionPipeline, folder: Path, settings: SpeedSettings) -> None:
        self._pipe, self._folder = pipe, folder
        self._side = settings.size // LATENT_FACTOR
        self._editors = {name: self._load(budget) for name, budget in BUDGETS.items()}
        self.seconds: dict[tuple[str, float], list[float]] = {}
        self.pictures: dict[float, set[bytes]] = {area: set() for area in AREAS}

    def _load(self, budget: int | None) -> Editor:
        editor = Editor(self._pipe, model=_MODEL, max_recorded_bytes=budget)
        editor.load(self._folder)
        return editor

    def take_turns(self) -> None:
        """Time one edit of every kind."""
        for name, editor in self._editors.items():
            self._time(name if name == IN_MEMORY else f"{name}, warm", AREAS[0], editor)
            if name != IN_MEMORY:
                drop_from_cache(self._folder)
                self._time(f"{name}, cold", AREAS[0], editor)
        self._time(IN_MEMORY, AREAS[1], self._editors[IN_MEMORY])
        for area in AREAS:
            drop_from_cache(self._folder)
            self._time("resumed, cold", area)
            self._time("resumed, warm", area)

    def _time(self, run: str, area: float, editor: Editor | None = None) -> None:
        """Time an edit; without an editor, loading the session included."""
        grid = square_mask(area, self._side)

        def edit() -> None:
            resumed = editor or self._load(None)
            result = resumed.edit(PROMPTS[1], mask=grid)
            resumed.delete(result.id)
            self.pictures[area].add(result.image.tobytes())

        self.seconds.setdefault((run, area), []).append(measure_seconds(edit))


def drop_from_cache(folder: Path) -> None:
    """Have the operating system read a folder's files from the disk the next time."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _generate(editor: Editor, settings: SpeedSettings, steps: int) -> None:
    editor.generate(
        PROMPTS[0],
        seed=7,
        guidance_scale=settings.guidance_scale,
        width=settings.size,
        height=settings.size,
        num_inference_steps=steps,
    )


def _long_run(pipe: StableDiffusionPipeline, settings: SpeedSettings) -> Row:
    """Return the memory of the process that a source of many steps and an edit take, within the smaller budget."""
    editor = Editor(pipe, max_recorded_bytes=BUDGETS["1 GB"])
    weights = sum(
        tensor.nbytes for part in (pipe.unet, pipe.vae, pipe.text_encoder) for tensor in part.state_dict().values()
    )
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    _generate(editor, settings, LONG_RUN)
    recorded = editor.current.stats.recorded_bytes
    editor.edit(PROMPTS[1], mask=square_mask(AREAS[0], settings.size // LATENT_FACTOR))
    peak = int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))[0]) * 1024
    return {
        "steps": LONG_RUN,
        "recorded_bytes": recorded,
        "in_memory_bytes": editor.recorded_bytes,
        "weights_bytes": weights,
        "peak_bytes": peak,
        "beside_weights_bytes": peak - weights,
    }


def _row(run: str, area: float, seconds: list[float], in_memory: list[float], made: float) -> Row:
    return {
        "run": run,
        "area": area,
        "seconds": interval(seconds).as_dict(),
        "to_memory": ratio(seconds, in_memory).as_dict(),
        "faster_than_anew": interval(
            [(made + own) / each for each, own in zip(seconds, in_memory, strict=True)]
        ).as_dict(),
    }


def _summary_row(row: Row) -> Row:
    return {
        "source": row["run"],
        "area": f"{row['area']:.0%}",
        "to memory": interval_text(row["to_memory"]),
        "faster than a source made anew": interval_text(row["faster_than_anew"]),
    }


if __name__ == "__main__":
    from benchmarks.commands import run

    run("tiers")
