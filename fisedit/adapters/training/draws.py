"""Everything random in a training run, drawn from its seed and the number of the step alone.

So a run that was stopped needs no saved generators, and goes on exactly as it would have.
"""

from __future__ import annotations

import torch


def generator_for(seed: int, step: int, device: torch.device) -> torch.Generator:
    """The source of all noise of one step."""
    return torch.Generator(device).manual_seed((seed << 32) + step)


def rows_from(seed: int, count: int, start: int, length: int) -> list[int]:
    """Which of `count` examples come at places `start` to `start + length` of a run: every pass has its own order."""
    rows: list[int] = []
    while len(rows) < length:
        passed, at = divmod(start + len(rows), count)
        order = torch.randperm(count, generator=generator_for(seed, passed, torch.device("cpu"))).tolist()
        rows += order[at : at + length - len(rows)]
    return rows
