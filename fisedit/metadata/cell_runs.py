"""Grids of latent cells as run lengths, and how edits were computed. Knows JSON values; trusts none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fisedit.metadata.json_checks import require
from fisedit.values import (
    DENSE_GROWTH,
    LATENT_FACTOR,
    MAX_DILATION,
    MAX_REGIONS,
    EditMode,
    RegionalPrompt,
    as_dilations,
    check_prompt,
    with_shallow,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from fisedit.values import BoolGrid, GenerationConfig


def run_lengths(grid: BoolGrid) -> list[int]:
    """Lengths of the runs of equal cells, row by row; the first run is outside and may be 0.

    Args:
        grid: booleans [h, w].
    """
    cells: NDArray[np.bool_] = np.concatenate([[False], grid.ravel()])
    edges = np.flatnonzero(cells[1:] != cells[:-1])
    runs: list[int] = np.diff([0, *edges, grid.size]).tolist()
    return runs


def decode_runs(runs: list[int], height: int, width: int) -> BoolGrid:
    """Booleans [h, w] from run lengths.

    Args:
        runs: The run lengths as `run_lengths` gives them.
        height: h.
        width: w.

    Raises:
        ValueError, TypeError: they are something else.
    """
    if not all(type(n) is int and n >= 0 for n in runs) or sum(runs) != height * width:
        raise ValueError(f"runs must fill {height}x{width} cells, got {runs!r:.80}")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width)


def is_rim(rim: BoolGrid, grid: BoolGrid) -> bool:
    """Return whether cells are a part of a mask, and not all of it.

    Args:
        rim: booleans [h, w].
        grid: the mask, booleans [h, w].
    """
    return bool(grid[rim].all() and grid[~rim].any())


def run_entry(run: EditMode) -> dict[str, Any]:
    """Return an edit's run as JSON has it; what only some edits have is left out of the others.

    Args:
        run: The run of one edit.
    """
    entry: dict[str, Any] = {name: getattr(run, name) for name in ("growth", "structure", "start", "checked")}
    regional = [{"prompt": each.prompt, "runs": run_lengths(each.grid)} for each in run.regional]
    some = {"erased": run.erases, "shallow": run.shallow, "regional": regional}
    rim = {} if run.rim is None else {"rim": run_lengths(run.rim)}
    return entry | {name: value for name, value in some.items() if value} | rim


def parse_run(entry: Mapping[str, Any], config: GenerationConfig) -> EditMode:
    """Return an edit's run from JSON.

    Args:
        entry: an object with what `run_entry` makes, and more.
        config: The config of the picture.

    Raises:
        PromptError, ValueError, TypeError, LookupError: it is something else.
    """
    growth, structure, start = tuple(entry["growth"]), entry["structure"], entry["start"]
    checked, erased, steps = entry["checked"], entry.get("erased", False), config.num_timesteps
    require(len(growth) in (0, steps) and all(type(cells) is int and 0 <= cells <= MAX_DILATION for cells in growth))
    require(type(structure) in (int, float) and 0 <= structure <= 1 and type(start) is int and 0 <= start < steps)
    require(isinstance(checked, bool) and isinstance(erased, bool))
    shallow = tuple(entry.get("shallow", ()))
    require(all(type(i) is int and start <= i < len(growth) for i in shallow) and sorted(set(shallow)) == [*shallow])
    size = config.height // LATENT_FACTOR, config.width // LATENT_FACTOR
    rim = decode_runs(entry["rim"], *size) if "rim" in entry else None
    regional = _parse_regional(entry.get("regional", []), *size)
    run = EditMode(with_shallow(as_dilations(growth), shallow), float(structure), start, checked, erased, regional, rim)
    require(not (run.needs_mask and (DENSE_GROWTH in growth or shallow)) and run.shallow == shallow)
    return run


def _parse_regional(entries: Any, height: int, width: int) -> tuple[RegionalPrompt, ...]:
    require(isinstance(entries, list) and len(entries) <= MAX_REGIONS)
    found = [RegionalPrompt(check_prompt(each["prompt"]), decode_runs(each["runs"], height, width)) for each in entries]
    require(all(each.grid.any() for each in found))
    return tuple(found)
