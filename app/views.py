"""What the page shows, as text, HTML and pictures: pure functions over results. Words of users are always escaped.

Knows Pillow and HTML; neither gradio nor sessions.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from PIL import Image, ImageFilter

from fisedit.errors import InputError, MaskError
from fisedit.storage import images
from fisedit.values import DENSE_STEP, EditKind, MaskSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.handlers import Outlook, Progress
    from fisedit.history import EditResult
    from fisedit.values import EditMask

TINT = (255, 64, 96)
MOST_SHOWN = 2_000
"""Letters of a prompt whose changes are shown."""

MOST_STROKES = 1 << 20
"""Letters of painted strokes, as the page sends them."""

_THUMB, _SCREEN = 112, 1280
_WORDS = re.compile(r"\s*(?:\w+|[^\w\s])")
_thumbs: WeakKeyDictionary[EditResult, str] = WeakKeyDictionary()


def changes(old: str, new: str) -> str:
    """A prompt as it was and as it is now, in one line of HTML: what goes is struck out, what comes is marked."""
    before, after = _WORDS.findall(old), _WORDS.findall(new)
    old_plain, new_plain = ([word.strip().casefold() for word in words] for words in (before, after))
    parts = []
    for kind, i, j, k, m in SequenceMatcher(None, old_plain, new_plain, autojunk=False).get_opcodes():
        gone, come = "".join(before[i:j]), "".join(after[k:m])
        if kind == "equal":
            parts.append(escape(come))
            continue
        parts += [_marked(words, tag) for words, tag in ((gone, "del"), (come, "ins")) if words]
    return "".join(parts)


def _marked(words: str, tag: str) -> str:
    bare = words.lstrip()
    return f"{words[: len(words) - len(bare)]}<{tag}>{escape(bare)}</{tag}>"


def outlook(seen: Outlook) -> str:
    """What an edit would do, in one line of HTML."""
    plan = seen.preview
    if plan.nothing:
        return _line(f"Nothing to do: {plan.nothing}.")
    cost = _seconds(seen.seconds, "about ")
    if plan.fallback:
        return _line(f"The whole picture will be painted: {plan.fallback}.", cost)
    sure = f"confidence {plan.confidence:.0%}" if plan.mask.source is MaskSource.ATTENTION else "where you painted"
    times = _times(seen.dense_seconds, seen.seconds)
    return _line(f"{plan.mask.area:.0%} of the picture", sure, cost, f"{times} (predicted)" if times else "")


def truth(
    result: EditResult,
    parent: EditResult | None,
    dense: float | None,
    *,
    measured: bool,
    means: str = "",
    gone: str = "",
) -> str:
    """What a result took and what it kept, in one line of HTML.

    Args:
        parent: what it was made from. dense: seconds of a dense run, measured or predicted; None where nobody knows.
        means: what a new picture was made by and with. gone: why it cannot be edited, or "".
    """
    stats = result.stats
    took = stats.seconds["total"]
    if parent is None:
        return _line("A new picture", _seconds(took, "in "), means, *stats.notes, gone)
    if not (stats.unet_evaluations_sparse or stats.unet_evaluations_dense):
        return _line(*stats.notes, kept(parent, result), gone)
    how = "measured" if measured else "predicted"
    times = _times(dense, took)
    rows = f"{_computed(result):.0%} of the rows computed" if stats.growth else "all rows computed"
    why = f"ran dense: {stats.fallback}" if stats.fallback else ""
    faster = f"{times} ({how})" if times else ""
    return _line(_seconds(took), faster, rows, kept(parent, result), why, *stats.notes, gone)


def _computed(result: EditResult) -> float:
    """Share of the finest level's rows that a sparse edit computed, dense steps in between included."""
    steps = result.stats.growth[result.stats.steps_shared :]
    dense = steps.count(DENSE_STEP) / len(steps)
    return float(dense + (1 - dense) * result.stats.active_rows[0] / result.mask.grid.size)


def kept(parent: EditResult, result: EditResult) -> str:
    """Whether every pixel outside the mask is the parent's: looked at, not believed."""
    if result.mask.grid.all():
        return "the mask is the whole picture"
    outside = np.asarray(result.mask.image().resize(result.image.size, 0)) == 0
    same = np.array_equal(np.asarray(parent.image)[outside], np.asarray(result.image)[outside])
    return "outside the mask: identical" if same else "outside the mask: changed"


def status(news: Progress) -> str:
    """A run's progress as HTML, with the time left."""
    done, left = f"step {news.step} of {news.steps}", _seconds(news.left, "", " left")
    told = escape(", ".join(filter(None, (done, left))))
    return f'<div class="run"><progress max="{news.steps}" value="{news.step}"></progress><span>{told}</span></div>'


def said(words: str, kind: str = "") -> str:
    """A sentence for the status line; `kind` is "error" for one that went wrong."""
    role = "alert" if kind == "error" else "status"
    return f'<p class="said {kind}" role="{role}">{escape(words)}</p>' if words else ""


def tree(results: Iterable[EditResult], current: str | None) -> str:
    """The history as HTML: sources begin rows, edits follow to the right, further branches stand below."""
    results = list(results)
    places = layout(results)
    parts = []
    for number, result in enumerate(results, 1):
        column, row = places[result.id]
        here = ' aria-current="true"' if result.id == current else ""
        origin = "a source" if result.parent is None else str(result.diff)
        name = escape(f"Picture {number}, {origin}: {result.prompt}", quote=True)
        short = escape(caption(result))
        up = row - places[result.parent][1] if result.parent is not None else 0
        way = "root" if result.parent is None else "branch" if up else "on"
        parts.append(
            f'<button type="button" class="node" data-id="{result.id}" title="{name}" aria-label="{name}"{here} '
            f'style="grid-column:{column + 1};grid-row:{row + 1};--up:{up}" data-way="{way}">'
            f'<img src="{thumbnail(result)}" alt="" loading="lazy"><span>{short}</span></button>'
        )
    return f'<div class="tree" role="group" aria-label="History">{"".join(parts)}</div>' if parts else ""


def layout(results: Iterable[EditResult]) -> dict[str, tuple[int, int]]:
    """(column, row) of every result, by id: depth, and one row for each branch."""
    children: dict[str | None, list[str]] = {}
    for result in results:
        children.setdefault(result.parent, []).append(result.id)
    places: dict[str, tuple[int, int]] = {}
    todo, row = [(name, 0, True) for name in reversed(children.get(None, []))], -1
    while todo:  # depth first; a first child stays in its parent's row
        name, column, breaks = todo.pop()
        row += breaks
        places[name] = column, row
        below = children.get(name, [])
        todo += [(child, column + 1, child != below[0]) for child in reversed(below)]
    return places


def thumbnail(result: EditResult) -> str:
    """A small picture of a result, as a data URL."""
    if result not in _thumbs:
        small = _rgb(result.image)
        small.thumbnail((_THUMB, _THUMB))
        _thumbs[result] = _url(small, "JPEG", quality=88)
    return _thumbs[result]


def shown(image: Image.Image) -> str:
    """A picture for the screen, as a data URL; larger ones are made smaller."""
    small = _rgb(image)
    if max(small.size) > _SCREEN:
        small.thumbnail((_SCREEN, _SCREEN))
        return _url(small, "JPEG", quality=90)
    return _url(small, "PNG", compress_level=3)


def region(mask: EditMask) -> str:
    """A mask to lay over its picture, as a data URL: tinted inside, with a rim; clear outside; "" for none."""
    if not mask.grid.any():
        return ""
    inside = mask.image()
    inner = inside.filter(ImageFilter.MinFilter(3))
    levels = np.asarray(inside) // 255 * 84 + (np.asarray(inside) - np.asarray(inner)) // 255 * 150
    picture = Image.new("RGBA", inside.size, TINT)
    picture.putalpha(Image.fromarray(levels.astype(np.uint8)))
    return _url(picture, "PNG")


def border(mask: EditMask | None) -> float:
    """Where before and after meet at first, as a percentage from the left: half of the mask lies on either side."""
    if mask is None or not mask.grid.any():
        return 50.0
    return float((np.median(np.nonzero(mask.grid)[1]) + 0.5) / mask.grid.shape[1] * 100)


def live(small: Image.Image, mask: EditMask | None) -> str:
    """How far a run is, as a data URL: its preview of one pixel per cell, inside the mask alone where that is known."""
    if mask is None or not mask.grid.any() or mask.grid.shape != small.size[::-1]:
        return _url(small, "PNG")
    picture = small.convert("RGBA")
    picture.putalpha(Image.fromarray(mask.grid.astype(np.uint8) * 255))
    return _url(picture.resize((small.width * 4, small.height * 4), Image.Resampling.BILINEAR), "PNG")


def strokes(sent: str, size: tuple[int, int]) -> tuple[Image.Image | None, Image.Image | None]:
    """What was painted: where an edit may go, and where it never may, as pictures of a size; None for nothing.

    Args:
        sent: a PNG as a data URL: red where strokes add, blue where they protect, clear elsewhere; "" for none.

    Raises:
        MaskError: anything else.
    """
    if not sent:
        return None, None
    kind, _, data = sent.partition(",") if isinstance(sent, str) else ("", "", "")
    if kind != "data:image/png;base64" or len(sent) > MOST_STROKES:
        raise MaskError(f"strokes must be a PNG as a data URL of at most {MOST_STROKES} letters; paint again")
    painted = images.decode(from_base64(data, "strokes"), "strokes").image
    if max(painted.size) > 2048:
        raise MaskError(f"strokes must have sides of at most 2048 pixels, got {painted.width}x{painted.height}")
    levels = np.asarray(painted.convert("RGBA")).astype(int)
    solid, red = levels[..., 3] > 127, levels[..., 0] >= levels[..., 2]
    return _area(solid & red, size), _area(solid & ~red, size)


def from_base64(text: str, what: str) -> bytes:
    """Bytes of base64. Raises InputError for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise InputError(f"{what} must be base64, got something else") from error


def _area(inside: NDArray[np.bool_], size: tuple[int, int]) -> Image.Image | None:
    return Image.fromarray(inside.astype(np.uint8) * 255).resize(size, 0) if inside.any() else None


def _line(*parts: str) -> str:
    return " · ".join(f"<span>{escape(part)}</span>" for part in parts if part)


def _seconds(seconds: float | None, before: str = "", after: str = "") -> str:
    if seconds is None:
        return ""
    told = f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
    return f"{before}{told}{after}"


def _times(dense: float | None, seconds: float | None) -> str:
    """How much faster than dense, in words."""
    if not dense or not seconds:
        return ""
    times = dense / seconds
    if 0.95 < times < 1.05:
        return "as fast as dense"
    return f"{times:.1f} times faster than dense" if times > 1 else f"{1 / times:.1f} times slower than dense"


def caption(result: EditResult) -> str:
    """A caption of a few letters."""
    words = result.prompt if result.parent is None or result.diff.kind is EditKind.IDENTICAL else str(result.diff)
    return words.replace(" -> ", " \N{RIGHTWARDS ARROW} ") or "a picture"


def _rgb(image: Image.Image) -> Image.Image:
    from fisedit.storage.canvas import to_srgb

    return to_srgb(image, alpha=False) if image.mode != "RGB" or image.info.get("icc_profile") else image.copy()


def _url(image: Image.Image, kind: str, **options: int) -> str:
    file = BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
