"""The report of `fisedit validate`: which rules held, medians by kind of edit, and a page with pictures.

Knows the rows of a run; runs no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fisedit.bench.html_page import figure, html_page, html_table
from fisedit.bench.timing import interval_text

Row = dict[str, Any]

NOTES = (
    "covered: share of what a dense edit of the whole picture changes, by squared levels, that the mask covers",
    "PSNR and SSIM: inside the mask, to diffusers' edit whose latents outside are the source's at every step",
    "faster: over the fastest exact run of diffusers here that was tried; median and range of the turns",
    "DeepCache leaves out layers in two of three steps, so that its picture is another: it is no exact run",
)


def check_rows(deviation: float, most: float, edits: list[Row]) -> list[Row]:
    """The three rules, whether they held, and in how many edits.

    Args:
        deviation: The deviation of latents with all rows active from diffusers'.
        most: The largest deviation that is allowed.
        edits: what every edit showed.
    """
    exact = [edit["exact"] for edit in edits if edit["exact"] is not None]
    unchanged = [edit["unchanged"] for edit in edits]
    return [
        {"rule": "E1: with all rows active, diffusers' latents", "held": deviation <= most, "seen": f"{deviation:.1e}"},
        {"rule": "E2: the same prompt gives the same bytes", "held": all(unchanged), "seen": _share(unchanged)},
        {"rule": "E3: latents and bytes outside stay", "held": all(exact), "seen": _share(exact)},
    ]


def _share(held: list[bool]) -> str:
    return f"{sum(held)} of {len(held)}"


def summary_rows(edits: list[Row]) -> list[Row]:
    """Medians by kind of edit, and of all.

    Args:
        edits: what every edit showed.
    """
    kinds = [*dict.fromkeys(edit["kind"] for edit in edits), "all"]
    return [_summary_row(kind, [edit for edit in edits if kind in ("all", edit["kind"])]) for kind in kinds]


def _summary_row(kind: str, edits: list[Row]) -> Row:
    row: Row = {"kind": kind, "edits": len(edits), "ran dense": sum(bool(edit["fallback"]) for edit in edits)}
    for label, key, form in (
        ("area", "area", "{:.0%}"),
        ("covered", "covered", "{:.0%}"),
        ("PSNR", "psnr", "{:.1f} dB"),
        ("SSIM", "ssim", "{:.3f}"),
        ("MACs", "macs_ratio", "{:.1f}x fewer"),
    ):
        values = [edit[key] for edit in edits if edit[key] is not None]
        row[label] = form.format(float(np.median(values))) if values else ""
    return row


def speed_row(row: Row, fastest: str) -> Row:
    """One line of speed.

    Args:
        row: a run's seconds, and how many times faster it is, or the reason why it was not timed.
        fastest: name of the run that it is compared with.
    """
    if "reason" in row:
        return {"run": row["run"], "seconds": row["reason"], "faster": ""}
    faster = "" if row["run"] == fastest else interval_text(row["faster"])
    return {"run": row["run"], "seconds": interval_text(row["seconds"], " s"), "faster": faster}


def report_page(report: Mapping[str, Any]) -> str:
    """The page of a report.

    Args:
        report: The report that `validate_model` gives.
    """
    memory = {name: f"{value / 1e9:.2f} GB" for name, value in report["memory"].items()}
    edits = [{key: _cell(value) for key, value in edit.items() if key != "picture"} for edit in report["edits"]]
    sections = [
        ("Checks", html_table([row | {"held": "yes" if row["held"] else "NO"} for row in report["checks"]])),
        ("Edits", html_table(report["summary"])),
        ("Speed", html_table(report["speed"])),
        ("Memory", html_table([memory])),
        ("Every edit", html_table(edits)),
        ("Settings", html_table([{key: str(value) for key, value in report["settings"].items()}])),
        ("Machine", html_table([{key: str(value) for key, value in report["environment"].items()}])),
        ("Notes", "\n".join(f"<p>{note}</p>" for note in report["notes"])),
        (
            "Pictures",
            "\n".join(
                figure(edit["picture"], f"{edit['source_prompt']} → {edit['prompt']}") for edit in report["edits"]
            ),
        ),
    ]
    return html_page("fisedit validate", sections)


def _cell(value: object) -> object:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else value
