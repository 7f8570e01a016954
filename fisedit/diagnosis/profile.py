"""The seconds of runs by layer: a table by kind and level, and a trace that Chrome's viewer opens.

Knows spans and layer sites; runs nothing itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisedit.costs.spans import layer_work, recorded_spans
from fisedit.features.sites import unet_sites
from fisedit.machine.stopwatch import OTHER, STEP, SpanRecorder
from fisedit.storage import files

if TYPE_CHECKING:
    from fisedit.features.sites import LayerSite
    from fisedit.machine.model import Model
    from fisedit.machine.stopwatch import Span


@dataclass
class _Entry:
    calls: int = 0
    seconds: float = 0.0
    macs: int = 0
    bytes: int = 0


class Profile:
    """The spans of a model's runs.

    Args:
        recorder: The recorder that has them.
        sites: the UNet's.
        tokens: The number of the text's tokens.
    """

    def __init__(self, recorder: SpanRecorder, sites: Sequence[LayerSite], tokens: int) -> None:
        self._recorder, self._sites, self._tokens = recorder, sites, tokens

    @property
    def spans(self) -> list[Span]:
        """Those that are over."""
        return self._recorder.spans

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of a table by kind of layer and level, the longest first, ready for JSON.

        They have calls, seconds that no layer within took, and their share. The UNet's layers also have
        multiply-accumulates, and the bytes that they read and write at least.
        """
        found: dict[tuple[str, int], _Entry] = defaultdict(_Entry)
        for span in self.spans:
            step = span.kind.startswith(STEP)
            entry = found[OTHER if step else span.kind, span.level]
            entry.calls += not step
            entry.seconds += span.own
            if span.work is not None:
                self._count(span, found)
        whole = sum(entry.seconds for entry in found.values()) or 1.0
        order = sorted(found.items(), key=lambda item: -item[1].seconds)
        return [_row(kind, level, entry, entry.seconds / whole) for (kind, level), entry in order]

    def _count(self, span: Span, found: dict[tuple[str, int], _Entry]) -> None:
        """Count the layers of a step."""
        assert span.work is not None
        work = layer_work(self._sites, span.work.rows, span.work.sizes, span.work.items, self._tokens)
        for key, (macs, moved) in work.items():
            found[key].macs += macs
            found[key].bytes += moved

    def trace(self) -> dict[str, Any]:
        """Every span, in the trace event format of Chrome, for chrome://tracing and ui.perfetto.dev."""
        return {"traceEvents": [_event(span) for span in self.spans], "displayTimeUnit": "ms"}

    def write_trace(self, path: Path) -> None:
        """Write `trace` as JSON, whole or not at all. Raises OSError: it cannot be written.

        Args:
            path: The path of the file.
        """
        files.write_json(self.trace(), path)


def _row(kind: str, level: int, entry: _Entry, share: float) -> dict[str, Any]:
    shown = {"layers": kind, "level": level if level >= 0 else "", "calls": entry.calls}
    return shown | {"MACs": entry.macs, "bytes": entry.bytes, "seconds": entry.seconds, "share": share}


def _event(span: Span) -> dict[str, Any]:
    return {
        "name": span.name or span.kind,
        "cat": span.kind,
        "ph": "X",
        "ts": span.start * 1e6,
        "dur": span.seconds * 1e6,
        "pid": 1,
        "tid": 1,
        "args": {"level": span.level, "step": span.step},
    }


@contextmanager
def profiled(pipe: Model) -> Iterator[Profile]:
    """Profile a model's runs in the enclosed calls of this thread, which take some tenths longer.

    Args:
        pipe: the model.
    """
    with recorded_spans(pipe) as recorder:
        yield Profile(recorder, unet_sites(pipe.unet), int(pipe.tokenizer.model_max_length))
