"""`python -m benchmarks.doctor_rates [runs]`: how often `fisedit doctor` names a layer, healthy and slowed.

Half of the runs are of the demo model as it is. In each of the others one layer, drawn at random, takes 30 % longer.
Prints in how many runs a layer was named that is healthy, and in how many the slowed one was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from fisedit.bench.environment import describe
from fisedit.diagnosis.layer_times import SHORTEST, layer_seconds, slow_layers
from fisedit.models.loader import load

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

SLOWDOWN, SIZE, ROUND_SECONDS = 0.3, 128, 1.0
"""Share by which a layer is slowed, side of the picture in pixels, seconds of a round."""


def main() -> None:
    """Measure and print."""
    runs, pipe = int(sys.argv[1]) if len(sys.argv) > 1 else 20, load("demo")
    baseline = layer_seconds(pipe, SIZE, 3 * ROUND_SECONDS)
    candidates = sorted(name for name, seconds in baseline.items() if seconds > SHORTEST)
    rng, false_alarms, detected = np.random.default_rng(0), 0, 0
    for _ in range(runs):
        false_alarms += bool(slow_layers(pipe, baseline, SIZE, ROUND_SECONDS))
        name = candidates[rng.integers(len(candidates))]
        with slow_down(pipe, name, SLOWDOWN * baseline[name]):
            reported = {delay.layer for delay in slow_layers(pipe, baseline, SIZE, ROUND_SECONDS)}
        detected += name in reported
        false_alarms += bool(reported - {name})
    print({**describe(str(pipe.unet.dtype)), "layers": len(candidates)})
    line = (
        f"a layer slowed by {SLOWDOWN:.0%} is named in {detected} of {runs} runs, "
        f"a healthy one in {false_alarms} of {2 * runs}"
    )
    print(line)


@contextmanager
def slow_down(pipe: StableDiffusionPipeline, name: str, seconds: float) -> Iterator[None]:
    """Let a layer of the UNet take longer.

    Args:
        pipe: the model.
        name: The name of the layer.
        seconds: longer.
    """

    def wait(_: nn.Module, __: Any, ___: Any) -> None:
        deadline = perf_counter() + seconds
        while perf_counter() < deadline:
            pass

    handle = pipe.unet.get_submodule(name).register_forward_hook(wait)
    try:
        yield
    finally:
        handle.remove()


if __name__ == "__main__":
    main()
