"""`python -m benchmarks.peak_memory`: memory that a source and an edit take at most, beside plain diffusers.

Every run is a process of its own, which loads one folder: SD 1.5's architecture with random weights in the precision
that is measured, if no model is named. Memory is resident: anonymous, which the process made, or mapped pages of files,
which the system may drop. Plain diffusers keeps weights mapped that it need not convert. Only Linux tells all of this.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fisedit.bench.workload import PROMPTS, square_mask
from fisedit.editor import Editor
from fisedit.machine.device import DTYPES, choose_dtype
from fisedit.models.loader import quiet_loaders
from fisedit.models.paths import locate
from fisedit.models.random_init import random_pipeline
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from fisedit.bench.settings import SpeedSettings
    from fisedit.values import OnStep

Row = dict[str, Any]
T = TypeVar("T")

PLAIN = "plain diffusers"

_UNPACKED = "FISEDIT_PACK=0"

RUNS: dict[str, dict[str, Any]] = {
    "as installed": {},
    _UNPACKED: {},
    f"{_UNPACKED}, int4": {"cache_dtype": "int4"},
    f"{_UNPACKED}, on disk": {"max_recorded_bytes": 0},
}
"""Name of a run of ours, which begins with the variable that it sets -> what `Editor.from_pretrained` is given."""

LOAD, SOURCE, EDIT = "load", "source", "edit"

_SAMPLE_SECONDS = 0.01


def measure_peak_memory(settings: SpeedSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Measure the memory of a source and an edit over it.

    Args:
        settings: model, size, steps, dtype and areas, of which the last is the edit's; no dtype for the CPU's own and
            float32.
        on_step: called before every run with (i, n, None).

    Returns:
        {"settings", "rows", "summary", "notes"}, ready for JSON.

    Raises:
        InputError: The dtype cannot be used here. ModelError: the model cannot be loaded.
    """
    names = dict.fromkeys((settings.dtype,) if settings.dtype else (None, "fp32"))
    dtypes = list(dict.fromkeys(choose_dtype(name, torch.device("cpu")) for name in names))
    runs = [(dtype, name) for dtype in dtypes for name in (PLAIN, *RUNS)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for i, (dtype, run) in enumerate(runs):
            if on_step is not None:
                on_step(i, len(runs), None)
            measure = _measure_plain if run == PLAIN else _measure_ours
            folder = _model_folder(settings.model, Path(name) / _name(dtype), dtype)
            rows.append(_in_a_process(partial(measure, run, folder, dtype, settings)))
    return {
        "settings": {
            "size": settings.size,
            "num_inference_steps": settings.num_inference_steps,
            "guidance_scale": settings.guidance_scale,
            "area": settings.areas[-1],
            "dtype": ", ".join(_name(dtype) for dtype in dtypes),
        },
        "rows": rows,
        "summary": [_summary_row(row, rows) for row in rows],
        "notes": [],
    }


def _model_folder(model: str | None, folder: Path, dtype: torch.dtype) -> str:
    """The folder or name of the model; random weights are written to a folder once."""
    if model is not None:
        return str(locate(model) or model)
    if not folder.exists():
        _in_a_process(partial(_write_random, folder, dtype))
    return str(folder)


def _write_random(folder: Path, dtype: torch.dtype) -> None:
    pipe: Any = random_pipeline(torch.device("cpu"), dtype)
    for part in (pipe.unet, pipe.vae):
        part.to(memory_format=torch.contiguous_format)
    pipe.save_pretrained(folder)


def _in_a_process(run: Callable[[], T]) -> T:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run).result()


def _measure_plain(run: str, folder: str, dtype: torch.dtype, settings: SpeedSettings) -> Row:
    peaks = _Peaks()
    with quiet_loaders(), peaks.stage(LOAD):
        from diffusers import StableDiffusionPipeline

        pipe = StableDiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    with peaks.stage(SOURCE):
        pipe(
            PROMPTS[0],
            width=settings.size,
            height=settings.size,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
            generator=torch.Generator().manual_seed(7),
        )
    return _row(run, dtype, peaks)


def _measure_ours(run: str, folder: str, dtype: torch.dtype, settings: SpeedSettings) -> Row:
    if run.startswith(_UNPACKED):
        os.environ["FISEDIT_PACK"] = "0"  # of this process, which ends with the run
    peaks = _Peaks()
    with peaks.stage(LOAD):
        editor = Editor.from_pretrained(folder, device="cpu", dtype=dtype, **RUNS[run])
    with peaks.stage(SOURCE):
        source = editor.generate(
            PROMPTS[0],
            seed=7,
            width=settings.size,
            height=settings.size,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
        )
    with peaks.stage(EDIT):
        editor.edit(PROMPTS[1], mask=square_mask(settings.areas[-1], settings.size // LATENT_FACTOR))
    return _row(run, dtype, peaks) | {"recorded_bytes": source.stats.recorded_bytes}


class _Peaks:
    """The memory that the stages of this process took at most.

    Attributes:
        bytes: by stage: all that was resident, and the anonymous part, which is sampled.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, dict[str, int]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the enclosed code."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        ended, anonymous = Event(), [_status("RssAnon")]

        def sample() -> None:
            while not ended.wait(_SAMPLE_SECONDS):
                anonymous.append(max(anonymous.pop(), _status("RssAnon")))

        thread = Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        peak = _status("VmHWM")
        self.bytes[name] = {"peak": peak, "anonymous": anonymous[0], "after": _status("VmRSS")}


def _status(name: str) -> int:
    """A number of bytes that Linux tells of this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(rf"{name}:\s*(\d+)", text)[0]) * 1024


def _row(run: str, dtype: torch.dtype, peaks: _Peaks) -> Row:
    return {
        "run": run,
        "dtype": _name(dtype),
        "stages": peaks.bytes,
        **{kind: max(stage[kind] for stage in peaks.bytes.values()) for kind in ("peak", "anonymous")},
    }


def _name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value is dtype)


def _summary_row(row: Row, rows: list[Row]) -> Row:
    plain = next(each for each in rows if each["run"] == PLAIN and each["dtype"] == row["dtype"])
    stages = {
        f"{name}, GB": f"{row['stages'][name]['peak'] / 1e9:.2f}" if name in row["stages"] else ""
        for name in (LOAD, SOURCE, EDIT)
    }
    return {
        "precision": row["dtype"],
        "run": row["run"],
        **stages,
        "anonymous, GB": f"{row['anonymous'] / 1e9:.2f}",
        "peak, to plain": f"{row['peak'] / plain['peak']:.2f}",
    }


if __name__ == "__main__":
    from benchmarks.commands import run

    run("peak_memory")
