"""`python -m fisedit.evaluation.plot REPORT.json`: draw what `fisedit bench edit --device cuda`
measured, as REPORT.svg.

Milliseconds of a step over the area of square masks, both on logarithmic axes. Knows reports; measures nothing.
"""

from __future__ import annotations

import json
import sys
from math import log10
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

SIZE = (760, 460)
MARGIN = (70, 30, 170, 60)
"""Left, top, right and bottom of the axes, in pixels."""

LINES = {
    "eager": ("diffusers, eager", "#888888"),
    "compiled": ("diffusers, compiled, graphs", "#222222"),
    "fast": ("a graph of torch's kernels", "#1f77b4"),
    "triton": ("a graph of our kernels", "#d62728"),
    "roofline": ("no kernel can be faster", "#2ca02c"),
}
"""Name in a report -> label and colour."""

Points = list[tuple[float, float]]


def series(report: dict[str, Any]) -> dict[str, Points]:
    """(percent of the picture, milliseconds of a step) of every line that a report has."""
    rows = sorted((row for row in report["rows"] if row["mask"] == "square"), key=lambda row: float(row["area"]))
    found: dict[str, Points] = {}
    for name in LINES:
        key = "step_roofline_seconds" if name == "roofline" else f"{name}_step_seconds"
        at = [(row["area"], row.get(key) or (report["dense"].get(key) if name != "roofline" else None)) for row in rows]
        if points := [(100 * area, 1000 * seconds) for area, seconds in at if seconds]:
            found[name] = points
    return found


def drawn(report: dict[str, Any]) -> str:
    """The picture, as SVG."""
    lines = series(report)
    xs, ys = ([point[i] for points in lines.values() for point in points] for i in (0, 1))
    left, top, right, bottom = MARGIN
    width, height = SIZE[0] - left - right, SIZE[1] - top - bottom

    def x(percent: float) -> float:
        return left + width * _share(percent, min(xs), max(xs))

    def y(milliseconds: float) -> float:
        return top + height * (1 - _share(milliseconds, min(ys) / 1.2, max(ys) * 1.2))

    parts = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#cccccc"/>']
    parts += [_text(x(p), top + height + 18, f"{p:.0f} %", "middle") for p in sorted(set(xs))]
    ticks = (base * 10.0**power for power in range(-3, 5) for base in (1, 2, 5))
    parts += [_text(left - 8, y(t) + 4, f"{t:g} ms", "end") for t in ticks if min(ys) / 1.2 <= t <= max(ys) * 1.2]
    for name, points in lines.items():
        label, colour = LINES[name]
        path = " ".join(f"{x(p):.1f},{y(ms):.1f}" for p, ms in points)
        parts.append(f'<polyline id="{name}" points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(left + width + 8, y(points[-1][1]) + 4, label, "start", colour))
    settings = report["settings"]
    title = f"A step at {settings['pixels']} pixels, {settings['dtype']}, on one {settings['device']}"
    parts.append(_text(left, SIZE[1] - 14, title, "start"))
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE[0]} {SIZE[1]}" font-family="sans-serif"'
    return "\n".join(
        [f'{frame} font-size="11">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"]
    )


def _share(value: float, low: float, high: float) -> float:
    return (log10(value) - log10(low)) / (log10(high) - log10(low)) if high > low else 0.5


def _text(x: float, y: float, words: str, anchor: str, colour: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_suffix(".svg").write_text(drawn(json.loads(source.read_text())))
