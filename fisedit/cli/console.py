"""Output of the command line: a progress bar, tables, one JSON object, and errors of one line.

Knows rich, and results only by their public values.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from fisedit.batch.values import ItemStatus, one_line
from fisedit.errors import Cancelled, FisEditError, InputError, ModelError, SessionError

if TYPE_CHECKING:
    from rich.table import Table

    from fisedit.batch.values import BatchOutcome, ItemRecord
    from fisedit.history import EditResult
    from fisedit.metadata.image_metadata import Metadata
    from fisedit.metadata.provenance import Origin
    from fisedit.values import EditStats, OnStep

_STATUS: tuple[tuple[type[BaseException], str, int], ...] = (
    (Cancelled, "cancelled", 130),
    (KeyboardInterrupt, "cancelled", 130),
    (InputError, "", 2),
    (ModelError, "", 2),
    (SessionError, "", 2),
    (FisEditError, "", 1),
    (MemoryError, "memory", 1),
    (OSError, "file", 1),
    (Exception, "internal", 1),
)
"""(exception, code if the exception has none of its own, exit status of the process)."""


_MAX_NOTES = 5
"""Kinds of notes of pictures that are printed, the most common first."""

_MAX_FAILURES = 20
_MAX_WIDTH = 10_000
"""Letters of a table's line where that is not folded."""


def print_error(error: BaseException) -> int:
    """Print an error as one line on stderr; returns its exit status."""
    kind, code, status = next(row for row in _STATUS if isinstance(error, row[0]))
    message = "stopped" if kind is KeyboardInterrupt else str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        where = "the output" if error.filename is None else error.filename
        message = f"{where} cannot be used ({error.strerror}); check its path, permissions and disk"
    if code == "internal":
        message = f"{type(error).__name__}: {message}; this is a bug: run again with --debug and report what it prints"
    return print_error_line(code or getattr(error, "code", "fisedit"), message, status)


def print_error_line(code: str, message: str, status: int) -> int:
    """Print `error[code]: message` on stderr, on one line and without control characters.

    Args:
        code: Stable name of the error.
        message: What is wrong and what to do.
        status: Exit status of the process.

    Returns:
        `status`.
    """
    line = "".join(character if character.isprintable() else " " for character in " ".join(message.split()))
    if sys.stderr is None:  # the process was started without: only the status remains
        return status
    try:
        print(f"error[{code}]: {line}", file=sys.stderr)
    except OSError:  # stderr is closed: only the status remains
        discard_output(sys.stderr)
    return status


def escape_unprintable_text() -> None:
    """Escape what a terminal's or a pipe's encoding lacks, instead of failing once the work is done."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None in a process that was started without
            stream.reconfigure(errors="backslashreplace")


def discard_output(stream: TextIO) -> None:
    """Discard a stream's unwritten output, which Python would flush again at exit, with another status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def flush() -> None:
    """Write out what was printed. Raises OSError where that cannot be done; what was not written is dropped then."""
    try:
        if sys.stdout is not None:  # a process may be started without
            sys.stdout.flush()
    except OSError:
        discard_output(sys.stdout)
        raise


@contextmanager
def progress(label: str, *, lines: bool = False) -> Iterator[OnStep]:
    """Show a progress bar on a terminal's stderr during the block; yields its `on_step`.

    Args:
        label: before the bar.
        lines: whether a stderr that is no terminal gets a line with the time a step, as logs of long runs need it.
    """
    from rich import progress as rich_progress
    from rich.console import Console

    console = Console(stderr=True)
    if lines and not console.is_terminal:

        def write_line(step: int, steps: int, _: object) -> None:
            print(f"{datetime.now():%H:%M:%S} {label}: {step} of {steps}", file=sys.stderr, flush=True)

        yield write_line
        return
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with rich_progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda step, steps, _: bar.update(task, completed=step, total=steps)


def show_json(value: object) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(value, indent=2, default=str))


def result_to_dict(result: EditResult) -> dict[str, Any]:
    """A result's JSON-ready values."""
    lineage = {"id": result.id, "parent": result.parent, "prompt": result.prompt}
    return lineage | {"change": _change_text(result), "stats": result.stats.as_dict()}


def show_rows(rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table of rows that share their keys, at its full width."""
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    _print_in_full(table)


def show_costs(results: Sequence[EditResult]) -> None:
    """Print the cost of each result beside that of a dense run, and its notes."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = ("change", "area", "UNet dense + sparse", "MACs", "dense MACs", "ratio", "seconds")
    table = Table(*names, title="What it cost", title_justify="left", box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        table.add_row(Text(_change_text(result)), *_cost_cells(result.stats))
    console = Console()
    console.print(table)
    for result in results:
        for note in result.stats.notes:
            console.print(f"note: {note}", markup=False, highlight=False)


def show_metadata(metadata: Metadata, origin: Origin, *, json: bool) -> None:
    """Print how an image was made: the text that web UIs read, then the source and every edit, a row each.

    Args:
        metadata: The texts of the image's file.
        origin: The parsed origin.
        json: Whether to print one JSON object instead.
    """
    if json:
        show_json(
            {"parameters": metadata.parameters, "fisedit": _parse_json(metadata.origin) if metadata.origin else None}
        )
        return
    if metadata.parameters.startswith("{"):  # another program's JSON: first the prompts in it
        print(one_line(origin.config.prompt))
        print(one_line(f"Negative prompt: {origin.config.negative_prompt}"))
    for line in metadata.parameters.split("\n"):
        print(one_line(line))
    if metadata.origin:
        source = ("opened" if origin.config.opened else "generated", origin.config.prompt, "", "")
        edits = [("edited", edit.prompt, edit.change, f"{edit.mask.area:.1%}") for edit in origin.edits]
        _show_texts(("", "prompt", "change", "area"), [source, *edits])


def show_plan(outcome: BatchOutcome, *, json: bool) -> None:
    """Print what a batch would do, one row per item."""
    if json:
        show_json(_outcome_to_dict(outcome))
        return
    _show_texts(
        ("picture", "source prompt", "prompt", "mask", "output", "to do"),
        [
            (
                r.item.name,
                r.item.source_prompt or "-",
                r.item.prompt,
                r.item.mask or "-",
                r.item.output,
                _planned_action(r),
            )
            for r in outcome.records
        ],
    )
    _show_notes(outcome.notes)


def show_outcome(outcome: BatchOutcome, *, json: bool) -> None:
    """Print the result of a batch: at most twenty failures with their reasons, the commonest notes, the counts."""
    if json:
        show_json(_outcome_to_dict(outcome))
        return
    failures = [record for record in outcome.records if record.reason]
    if failures:
        _show_texts(("failed", "why"), [(record.item.name, record.reason) for record in failures[:_MAX_FAILURES]])
    more = len(failures) - _MAX_FAILURES
    _show_notes((*outcome.notes, *([f"{more} more failed; see --report or --json"] if more > 0 else [])))
    of_items = Counter(note for record in outcome.records for note in record.notes)
    _show_notes([f"{count} of {len(outcome.records)}: {note}" for note, count in of_items.most_common(_MAX_NOTES)])
    if outcome.counts[ItemStatus.LEFT]:
        _show_notes(["run the same command again to go on with what is left"])
    show_rows([{str(status): count for status, count in outcome.counts.items()} | {"seconds": outcome.seconds}])


def _outcome_to_dict(outcome: BatchOutcome) -> dict[str, Any]:
    items = [
        {
            "image": record.item.name,
            "output": record.item.output,
            "prompt": record.item.prompt,
            "source_prompt": record.item.source_prompt,
            "mask": record.item.mask,
            "status": record.status,
            "reason": record.reason,
            "change": record.change,
            "seconds": record.seconds,
            "notes": record.notes,
        }
        for record in outcome.records
    ]
    counts = {str(status): count for status, count in outcome.counts.items()}
    return {"counts": counts, "seconds": outcome.seconds, "notes": outcome.notes, "items": items}


def _parse_json(text: str) -> object:
    return json.loads(text) if text else None


def _planned_action(record: ItemRecord) -> str:
    return {"left": "edit", "done before": "-"}.get(record.status, record.reason)


def _show_texts(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table of untrusted texts, without markup and control characters; no text is cut.

    On a terminal long texts are folded, elsewhere a row is a line.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, overflow="fold") for name in head))
    for row in rows:
        table.add_row(*(Text(one_line(str(cell))) for cell in row))
    if (console := Console()).is_terminal:
        console.print(table)
    else:
        _print_in_full(table)


def _print_in_full(table: Table) -> None:
    """Print a table at its full width."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    width = Measurement.get(console, console.options.update(max_width=_MAX_WIDTH), table).maximum
    Console(width=max(console.width, width)).print(table, crop=False)


def _show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {one_line(note)}")


def _change_text(result: EditResult) -> str:
    return "source" if result.parent is None else str(result.diff)


def _cost_cells(stats: EditStats) -> tuple[str, ...]:
    ratio = f"{stats.macs_dense / stats.macs:.1f}x" if stats.macs else "-"
    return (
        f"{stats.mask_area:.1%}",
        f"{stats.unet_evaluations_dense} + {stats.unet_evaluations_sparse}",
        f"{stats.macs / 1e9:,.1f} G",
        f"{stats.macs_dense / 1e9:,.1f} G",
        ratio,
        f"{stats.seconds.get('total', 0):.2f}",
    )
