"""Grids of latent cells as run lengths, and the prompts of regions with theirs. Knows JSON values; trusts none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fisedit.values import LATENT_FACTOR, MAX_REGIONS, RegionalPrompt, check_prompt

if TYPE_CHECKING:
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
        runs: as `run_lengths` gives them.
        height: h.
        width: w.

    Raises:
        ValueError, TypeError: they are something else.
    """
    if not all(type(n) is int and n >= 0 for n in runs) or sum(runs) != height * width:
        raise ValueError(f"runs must fill {height}x{width} cells, got {runs!r:.80}")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width)


def regional_entries(regional: Sequence[RegionalPrompt]) -> list[dict[str, Any]]:
    """Prompts of regions as JSON has them.

    Args:
        regional: of one edit.
    """
    return [{"prompt": each.prompt, "runs": run_lengths(each.grid)} for each in regional]


def parse_regional(entries: Any, config: GenerationConfig) -> tuple[RegionalPrompt, ...]:
    """Prompts of regions from JSON.

    Args:
        entries: as `regional_entries` makes them.
        config: of the picture that they are in.

    Raises:
        PromptError, ValueError, TypeError, LookupError: they are something else.
    """
    if not isinstance(entries, list) or len(entries) > MAX_REGIONS:
        raise ValueError(f"regions must be at most {MAX_REGIONS}, got {entries!r:.80}")
    size = config.height // LATENT_FACTOR, config.width // LATENT_FACTOR
    found = [RegionalPrompt(check_prompt(each["prompt"]), decode_runs(each["runs"], *size)) for each in entries]
    if not all(each.grid.any() for each in found):
        raise ValueError("a region must have a cell")
    return tuple(found)
