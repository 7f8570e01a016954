"""The fastest dense run of a machine: which precision, memory format and execution, found by timing them in turns.

Knows variants and seconds; what a variant runs, `dense_pipelines` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

MAX_SLOWDOWN = 1.5
"""A variant that takes this many times as long as the fastest so far is not timed again."""

MAX_COMPILE_SLOWDOWN = 1.25
"""A variant is compiled, in minutes, if its eager form takes at most this many times the fastest one's time."""

NUM_ROUNDS = 3
"""The number of further rounds, after the first timing, in which the variants that are left take turns."""


@dataclass(frozen=True)
class DenseVariant:
    """A way to run diffusers densely.

    Args:
        dtype: fp32, bf16 or fp16.
        channels_last: whether weights of convolutions lie channels last, instead of contiguous.
        compiled: whether torch.compile runs UNet and decoder, instead of eager torch.
    """

    dtype: str
    channels_last: bool
    compiled: bool

    @property
    def name(self) -> str:
        """Such as "bf16, channels_last, eager"."""
        layout = "channels_last" if self.channels_last else "contiguous"
        return f"{self.dtype}, {layout}, {'torch.compile' if self.compiled else 'eager'}"


DEFAULT_VARIANT = DenseVariant("fp32", channels_last=False, compiled=False)
"""diffusers as it comes."""


@dataclass(frozen=True)
class DenseSearch:
    """The result of a search.

    Args:
        best: the fastest variant.
        seconds: variant -> seconds of every timing.
        left_out: variant -> why it was not timed to the end.
    """

    best: DenseVariant
    seconds: dict[DenseVariant, list[float]]
    left_out: dict[DenseVariant, str]

    def as_dict(self) -> dict[str, Any]:
        """The variant's names, timings and reasons, ready for JSON."""
        return {
            "best": self.best.name,
            "seconds": {variant.name: times for variant, times in self.seconds.items()},
            "left_out": {variant.name: reason for variant, reason in self.left_out.items()},
        }


def variants(device: str, *, compiled: bool) -> list[DenseVariant]:
    """Every variant of a device, 16-bit ones first, compiled ones last.

    Args:
        device: its torch type; fp16 is for GPUs, where it alone is compiled.
        compiled: whether torch.compile is tried.
    """
    dtypes = ("fp16", "bf16", "fp32") if device == "cuda" else ("bf16", "fp32")
    eager = [DenseVariant(dtype, layout, compiled=False) for dtype in dtypes for layout in (True, False)]
    compilable = [variant for variant in eager if device != "cuda" or variant.dtype == "fp16"]
    return [*eager, *(replace(variant, compiled=True) for variant in compilable if compiled)]


def find_fastest(
    candidates: Sequence[DenseVariant],
    measure: Callable[[DenseVariant], float],
    release: Callable[[DenseVariant], None] = lambda _: None,
) -> DenseSearch:
    """Time every candidate once, drop those that are too slow, and let the others take turns.

    Args:
        candidates: eager ones before compiled ones.
        measure: seconds of one dense run of a variant, warmed up; RuntimeError where it cannot run.
        release: frees what a variant that was dropped holds.

    Raises:
        RuntimeError: no candidate can run.
    """
    seconds: dict[DenseVariant, list[float]] = {}
    left_out: dict[DenseVariant, str] = {}
    for variant in candidates:
        if reason := _not_compiled(variant, seconds):
            left_out[variant] = reason
            continue
        try:
            seconds[variant] = [measure(variant)]
        except RuntimeError as error:
            left_out[variant] = f"it cannot run here: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
            release(variant)
        for slow_variant, factor in _too_slow(seconds, left_out).items():
            left_out[slow_variant] = f"{factor:.1f} times as long as the fastest"
            release(slow_variant)
    remaining = [variant for variant in seconds if variant not in left_out]
    if not remaining:
        raise RuntimeError(f"no dense run works here: {'; '.join(left_out.values())}")
    for _ in range(NUM_ROUNDS):
        for variant in remaining:
            seconds[variant].append(measure(variant))
    best = min(remaining, key=lambda variant: median(seconds[variant]))
    return DenseSearch(best, seconds, left_out)


def _not_compiled(variant: DenseVariant, seconds: dict[DenseVariant, list[float]]) -> str:
    """Return why a compiled variant is not worth its compilation, or "". Timings so far count."""
    if not variant.compiled:
        return ""
    eager = {other: times[0] for other, times in seconds.items() if not other.compiled}
    eager_seconds = eager.get(replace(variant, compiled=False))
    if eager_seconds is None:
        return "its eager form cannot run here"
    factor = eager_seconds / min(eager.values())
    return f"its eager form takes {factor:.1f} times as long as the fastest" if factor > MAX_COMPILE_SLOWDOWN else ""


def _too_slow(seconds: dict[DenseVariant, list[float]], left_out: dict[DenseVariant, str]) -> dict[DenseVariant, float]:
    """Variant -> how many times as long as the fastest it takes, of those that take too long and are still in."""
    fastest = min((times[0] for times in seconds.values()), default=0.0)
    factors = {variant: times[0] / fastest for variant, times in seconds.items() if variant not in left_out}
    return {variant: factor for variant, factor in factors.items() if factor > MAX_SLOWDOWN}
