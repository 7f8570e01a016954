"""The random numbers of a training run, drawn from its seed and the number of the step only.

So a run that was stopped needs no saved generators, and continues exactly. Knows torch's generators only.
"""

from __future__ import annotations

import torch


def generator_for(seed: int, step: int, device: torch.device) -> torch.Generator:
    """The generator of all noise of one step.

    Args:
        seed: The seed of the run.
        step: number of the step.
        device: The device of the generator.
    """
    return torch.Generator(device).manual_seed((seed << 32) + step)


def draw_rows(seed: int, count: int, start: int, length: int) -> list[int]:
    """Draw the examples of consecutive places of a run; every pass over them has its own order.

    Args:
        seed: The seed of the run.
        count: number of examples.
        start: first place.
        length: number of places.

    Returns:
        Indices in [0, count).
    """
    rows: list[int] = []
    while len(rows) < length:
        epoch, at = divmod(start + len(rows), count)
        order = torch.randperm(count, generator=generator_for(seed, epoch, torch.device("cpu"))).tolist()
        rows += order[at : at + length - len(rows)]
    return rows
