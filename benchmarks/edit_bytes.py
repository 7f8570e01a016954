"""`python -m benchmarks.edit_bytes`: bytes that edits keep beside their source, by the dtype of recorded features.

Counted by `features.record_size` for the schedules that edits choose, so nothing is run. What a decode records is
beside it, and the same in all dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fisedit.bench.workload import load_workload, square_mask
from fisedit.costs.schedules import find_shallow_steps
from fisedit.features.codec import CACHE_DTYPES, choose_encoding
from fisedit.sampling.engine import Engine
from fisedit.values import LATENT_FACTOR, Quality, Shallow, Step

if TYPE_CHECKING:
    from fisedit.bench.settings import SpeedSettings
    from fisedit.values import Dilation, OnStep

Row = dict[str, Any]


def count_edit_bytes(settings: SpeedSettings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Count what a source and edits of it keep.

    Args:
        settings: model, size, steps and areas.
        on_step: called before every dtype with (i, n, None).

    Returns:
        {"settings", "rows", "summary", "notes"}, ready for JSON.

    Raises:
        InputError: the device is not on this machine. ModelError: the model cannot be loaded.
    """
    workload, names = load_workload(settings), ("auto", *CACHE_DTYPES)
    rows: list[Row] = []
    for i, name in enumerate(names):
        if on_step is not None:
            on_step(i, len(names), None)
        engine = Engine(workload.pipe, encoding=choose_encoding(name, workload.device))
        counted = _Counted(engine, workload.config)
        for area in settings.areas:
            rows += [{"cache_dtype": name, **counted.row(area, quality)} for quality in Quality]
    return {
        "settings": {
            "size": settings.size,
            "num_inference_steps": settings.num_inference_steps,
            "dtype": str(workload.dtype).removeprefix("torch."),
        },
        "rows": rows,
        "summary": [_summary_row(row) for row in rows],
        "notes": ["what decodes record is not counted"],
    }


class _Counted:
    """The source of an engine, and edits of it.

    Args:
        engine: The engine with its encoding.
        config: The config of the source.
    """

    def __init__(self, engine: Engine, config: Any) -> None:
        self._size, self._costs, self._runs = engine.record_size(config), engine.costs(config), engine.executor.shallow
        self._steps, self._side = config.num_timesteps, config.width // LATENT_FACTOR
        self._source = engine.recorded_bytes(config)

    def row(self, area: float, quality: Quality) -> Row:
        """The bytes of an edit in a square."""
        grid = square_mask(area, self._side)
        shallow = find_shallow_steps(self._steps)
        dilations = self._costs.choose_dilations(grid, quality=quality, shallow=shallow)
        kept = sum(self._step(grid, dilation) for dilation in dilations)
        return {
            "area": area,
            "quality": quality.value,
            "dense_steps": dilations.count(Step.DENSE),
            "shallow_steps": sum(isinstance(each, Shallow) for each in dilations),
            "source_bytes": self._source,
            "edit_bytes": kept,
        }

    def _step(self, grid: Any, dilation: Dilation) -> int:
        if dilation is Step.DENSE:
            return self._size.step
        rows = self._costs.rows(grid, (dilation,))
        return self._size.overlay(rows, self._runs.runs) if isinstance(dilation, Shallow) else self._size.overlay(rows)


def _summary_row(row: Row) -> Row:
    return {
        "kept in": row["cache_dtype"],
        "area": f"{row['area']:.0%}",
        "quality": row["quality"],
        "dense, shallow": f"{row['dense_steps']}, {row['shallow_steps']}",
        "source": f"{row['source_bytes'] / 1e9:.2f} GB",
        "edit": f"{row['edit_bytes'] / 1e9:.2f} GB",
        "of the source": f"{row['edit_bytes'] / row['source_bytes']:.2f}",
    }


if __name__ == "__main__":
    from benchmarks.commands import run

    run("edit_bytes")
