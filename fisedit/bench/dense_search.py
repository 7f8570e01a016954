"""The fastest dense run of a machine: which precision, memory format and execution, found by timing them in turns.

Knows variants and seconds; what a variant runs, `dense_pipelines` knows. Two baselines come of it: the fastest exact
run, which computes all of the model, and the fastest of any kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fisedit.bench.timing import interval, interval_text, ratio

Row = dict[str, Any]
Samples = dict[str, list[float]]
"""Name of a call -> its seconds in every round."""

MAX_SLOWDOWN = 1.5
"""A variant that takes this many times as long as the fastest so far is not timed again."""

MAX_COMPILE_SLOWDOWN = 1.25
"""A variant is compiled, in minutes, if its eager form takes at most this many times the fastest one's time."""

NUM_ROUNDS = 3
"""The number of further rounds, after the first timing, in which the variants that are left take turns."""


TORCH, OPENVINO, DEEPCACHE = "torch", "OpenVINO", "DeepCache"
"""Names of runtimes, which run a pipeline's networks. DeepCache is torch that leaves out deep layers in most steps."""

DEEPCACHE_INTERVAL = 3
"""Steps from one whole evaluation to the next in DeepCache's runs."""


TITLES = {"exact": "fastest exact run", "any": "fastest run of any kind"}
"""Kind of baseline -> its name in tables."""


@dataclass(frozen=True)
class DenseVariant:
    """A way to run diffusers densely.

    Args:
        dtype: fp32, bf16 or fp16.
        channels_last: whether weights of convolutions lie channels last, instead of contiguous.
        compiled: whether torch.compile runs UNet and decoder, instead of eager torch.
        runtime: what runs them: torch, OpenVINO or DeepCache.
    """

    dtype: str
    channels_last: bool
    compiled: bool
    runtime: str = TORCH

    @property
    def name(self) -> str:
        """Such as "bf16, channels_last, eager" or "OpenVINO, bf16"."""
        if self.runtime == OPENVINO:
            return f"{OPENVINO}, {self.dtype}"
        layout = "channels_last" if self.channels_last else "contiguous"
        name = f"{self.dtype}, {layout}, {'torch.compile' if self.compiled else 'eager'}"
        return f"{DEEPCACHE}, interval {DEEPCACHE_INTERVAL}, {name}" if self.runtime == DEEPCACHE else name

    @property
    def is_exact(self) -> bool:
        """Return whether it computes all of the model at every step."""
        return self.runtime != DEEPCACHE


DEFAULT_VARIANT = DenseVariant("fp32", channels_last=False, compiled=False)
"""diffusers as it comes."""


@dataclass(frozen=True)
class DenseSearch:
    """The result of a search.

    Args:
        best: the fastest variant, which is exact.
        seconds: variant -> seconds of every timing.
        left_out: variant -> why it was not timed to the end.
    """

    best: DenseVariant
    seconds: dict[DenseVariant, list[float]]
    left_out: dict[DenseVariant, str]

    def best_of(self, runtime: str) -> DenseVariant | None:
        """The fastest variant of a runtime, or None where it has none.

        Args:
            runtime: torch or OpenVINO.
        """
        mine = [v for v in self.seconds if v.runtime == runtime and v not in self.left_out]
        return min(mine, key=lambda variant: median(self.seconds[variant]), default=None)

    @property
    def fastest_compiled(self) -> DenseVariant | None:
        """The fastest variant that torch.compile runs, or None where there is none."""
        compiled = [v for v in self.seconds if v.compiled]
        return min(compiled, key=lambda variant: median(self.seconds[variant]), default=None)

    @property
    def fastest_eager(self) -> DenseVariant:
        """The fastest variant of eager torch, whether or not a compiled one left it out."""
        eager = [v for v in self.seconds if v.runtime == TORCH and not v.compiled]
        return min(eager, key=lambda variant: median(self.seconds[variant]), default=DEFAULT_VARIANT)

    def as_dict(self) -> dict[str, Any]:
        """The variant's names, timings and reasons, ready for JSON."""
        return {
            "best": self.best.name,
            "seconds": {variant.name: times for variant, times in self.seconds.items()},
            "left_out": {variant.name: reason for variant, reason in self.left_out.items()},
        }


def variants(device: str, *, compiled: bool) -> list[DenseVariant]:
    """Every exact variant of a device, 16-bit ones first, compiled ones behind eager ones, OpenVINO's last.

    Args:
        device: its torch type; fp16 is for GPUs, where it alone is compiled, and OpenVINO for CPUs.
        compiled: whether torch.compile is tried. On a GPU it chooses the layouts of convolutions itself, so one of them
            is compiled there.
    """
    dtypes = ("fp16", "bf16", "fp32") if device == "cuda" else ("bf16", "fp32")
    eager = [DenseVariant(dtype, layout, compiled=False) for dtype in dtypes for layout in (True, False)]
    compilable = [variant for variant in eager if device != "cuda" or variant == eager[0]]
    openvino = [] if device == "cuda" else [DenseVariant(dtype, True, False, OPENVINO) for dtype in dtypes]
    return [*eager, *(replace(variant, compiled=True) for variant in compilable if compiled), *openvino]


def find_fastest(
    candidates: Sequence[DenseVariant],
    measure: Callable[[DenseVariant], float],
    release: Callable[[DenseVariant], None] = lambda _: None,
    rounds: int | None = None,
) -> DenseSearch:
    """Time every candidate once, drop those that are too slow, and let the others take turns.

    Candidates are dropped beside the fastest of their own runtime, so that each has one left.

    Args:
        candidates: eager ones before compiled ones.
        measure: seconds of one dense run of a variant, warmed up; RuntimeError where it cannot run, ImportError where
            its package is missing.
        release: frees what a variant that was dropped holds.
        rounds: The most further rounds; None for `NUM_ROUNDS`.

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
        except (ImportError, RuntimeError) as error:
            left_out[variant] = failure(error)
            release(variant)
        for slow_variant, factor in _too_slow(seconds, left_out).items():
            left_out[slow_variant] = f"{factor:.1f} times as long as the fastest"
            release(slow_variant)
    remaining = [variant for variant in seconds if variant not in left_out]
    if not remaining:
        raise RuntimeError(f"no dense run works here: {'; '.join(left_out.values())}")
    for _ in range(NUM_ROUNDS if rounds is None else min(rounds, NUM_ROUNDS)):
        for variant in remaining:
            seconds[variant].append(measure(variant))
    best = min(remaining, key=lambda variant: median(seconds[variant]))
    return DenseSearch(best, seconds, left_out)


def failure(error: Exception) -> str:
    """Return why a variant cannot run, in one line.

    Args:
        error: what it raised.
    """
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed"
    return f"it cannot run here: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


def _not_compiled(variant: DenseVariant, seconds: dict[DenseVariant, list[float]]) -> str:
    """Return why a compiled variant is not worth its compilation, or "". Timings so far count."""
    if not variant.compiled:
        return ""
    eager = {v: times[0] for v, times in seconds.items() if v.runtime == variant.runtime and not v.compiled}
    eager_seconds = eager.get(replace(variant, compiled=False))
    if eager_seconds is None:
        return "its eager form cannot run here"
    factor = eager_seconds / min(eager.values())
    return f"its eager form takes {factor:.1f} times as long as the fastest" if factor > MAX_COMPILE_SLOWDOWN else ""


def _too_slow(seconds: dict[DenseVariant, list[float]], left_out: dict[DenseVariant, str]) -> dict[DenseVariant, float]:
    """Variant -> how many times as long as the fastest of its runtime it takes, of those that take too long and are
    still in."""
    fastest: dict[str, float] = {}
    for variant, times in seconds.items():
        fastest[variant.runtime] = min(times[0], fastest.get(variant.runtime, times[0]))
    factors = {v: times[0] / fastest[v.runtime] for v, times in seconds.items() if v not in left_out}
    return {variant: factor for variant, factor in factors.items() if factor > MAX_SLOWDOWN}


def whole_runs(best: DenseVariant, others: Mapping[DenseVariant, str]) -> dict[str, DenseVariant]:
    """Name of a call -> the dense run that it times whole: "dense" for the fastest exact one.

    Args:
        best: the fastest exact run.
        others: the other baselines, with why they cannot be timed.
    """
    return {"dense": best} | {variant.name: variant for variant, reason in others.items() if not reason}


def baseline_rows(best: DenseVariant, others: Mapping[DenseVariant, str], samples: Samples) -> list[Row]:
    """Every baseline: its name, whether it is exact, the fastest of its kind, and its seconds or why it has none.

    Args:
        best: the fastest exact run.
        others: the other baselines, with why they cannot be timed.
        samples: seconds of every call by round.
    """
    timed = whole_runs(best, others)
    fastest = min(timed, key=lambda call: median(samples[call]))
    rows: list[Row] = [
        {
            "run": variant.name,
            "call": call,
            "exact": variant.is_exact,
            "fastest": [kind for kind, of in (("exact", "dense"), ("any", fastest)) if of == call],
            "whole_seconds": interval(samples[call]).as_dict(),
            "over_fastest_exact": ratio(samples[call], samples["dense"]).as_dict(),
            "reason": "",
        }
        for call, variant in timed.items()
    ]
    left_out = {variant: reason for variant, reason in others.items() if reason}
    return rows + [
        {"run": variant.name, "exact": variant.is_exact, "fastest": [], "reason": reason}
        for variant, reason in left_out.items()
    ]


def fastest_call(baselines: Sequence[Row], kind: str) -> str:
    """The call that times the fastest baseline.

    Args:
        baselines: The rows of `baseline_rows`.
        kind: exact or any.
    """
    return next(str(row["call"]) for row in baselines if kind in row["fastest"])


def baseline_settings(baselines: Sequence[Row]) -> dict[str, str]:
    """Names of the two baselines, for the settings of a report.

    Args:
        baselines: The rows of `baseline_rows`.
    """
    names = {kind: row["run"] for row in baselines for kind in row["fastest"]}
    return {"dense_baseline": f"diffusers, {names['exact']}", "any_baseline": f"diffusers, {names['any']}"}


def dense_summary(metrics: Row, baselines: Sequence[Row]) -> list[Row]:
    """The short table of dense runs: the baselines, those that are left out with their reason, and our source.

    Args:
        metrics: The metrics of `speed.dense_metrics`.
        baselines: The rows of `baseline_rows`.
    """
    rows = []
    for baseline in baselines:
        step = metrics["dense_step"] if baseline.get("call") == "dense" else None
        rows.append(_dense_row(run_title(baseline), baseline, step))
    if "plain" in metrics:
        plain = {"whole_seconds": metrics["plain"], "over_fastest_exact": metrics["plain_over_dense"]}
        rows.append(_dense_row(f"plain diffusers: {DEFAULT_VARIANT.name}", plain, metrics["plain_step"]))
    source = {"whole_seconds": metrics["source"], "over_fastest_exact": metrics["source_over_dense"]}
    return [*rows, _dense_row("our source, recorded", source, metrics["recorded_step"])]


def run_title(baseline: Row) -> str:
    """A baseline's name behind what it is the fastest of, such as "fastest exact run: bf16, channels_last, eager".

    Args:
        baseline: A row of `baseline_rows`.
    """
    titles = " and ".join(TITLES[kind] for kind in baseline["fastest"])
    return f"{titles}: {baseline['run']}" if titles else str(baseline["run"])


def _dense_row(name: str, row: Row, step: dict[str, float] | None) -> Row:
    """One line; a run without seconds has the reason in their place."""
    if "whole_seconds" not in row:
        return {"run": name, "step": "", "whole": row["reason"], "over the fastest": ""}
    is_fastest = "exact" in row.get("fastest", ())
    return {
        "run": name,
        "step": interval_text(step, " s") if step else "",
        "whole": interval_text(row["whole_seconds"], " s"),
        "over the fastest": "1" if is_fastest else interval_text(row["over_fastest_exact"]),
    }
