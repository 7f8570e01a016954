"""Texts and HTML of the page: pure functions over results. Words of users are always escaped.

Knows results and views of pictures; neither gradio nor sessions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from html import escape
from typing import TYPE_CHECKING

from app import views
from fisedit.prompts.chunks import MAX_CHUNKS
from fisedit.values import EditKind, MaskSource, dense_run_as_text

if TYPE_CHECKING:
    from app.handlers import EditEstimate
    from app.runs import RunProgress
    from app.word_edits import NounEdits
    from fisedit.history import EditResult, History
    from fisedit.models.vocabulary import Vocabulary

MAX_DIFF_CHARACTERS = 2_000
"""Characters of a prompt whose changes are shown, at most."""

_WORDS = re.compile(r"\s*(?:\w+|[^\w\s])")


def changes(old: str, new: str, unknown: Collection[str] = ()) -> str:
    """A prompt as it was and as it is now, in one line of HTML: removed words are struck out, added ones marked.

    Args:
        old: the prompt before.
        new: the prompt now.
        unknown: words that the model does not know, in lower case; they are underlined.
    """
    before, after = _WORDS.findall(old), _WORDS.findall(new)
    old_plain, new_plain = ([word.strip().casefold() for word in words] for words in (before, after))
    parts = []
    for kind, i, j, k, m in SequenceMatcher(None, old_plain, new_plain, autojunk=False).get_opcodes():
        removed, added = "".join(before[i:j]), "".join(after[k:m])
        if kind == "equal":
            parts.append(_underlined(added, unknown))
            continue
        marked = (escape(removed), "del"), (_underlined(added, unknown), "ins")
        parts += [_marked(words, tag) for words, tag in marked if words]
    return "".join(parts)


def _marked(words: str, tag: str) -> str:
    bare = words.lstrip()
    return f"{words[: len(words) - len(bare)]}<{tag}>{bare}</{tag}>"


def _underlined(words: str, unknown: Collection[str]) -> str:
    """Escaped words, of which those that the model does not know are underlined."""
    if not unknown:
        return escape(words)
    parts = re.split(rf"\b({'|'.join(map(re.escape, unknown))})\b", words, flags=re.IGNORECASE)
    return "".join(
        f'<u title="not known by this model">{escape(part)}</u>' if i % 2 else escape(part)
        for i, part in enumerate(parts)
    )


def nouns(prompt: str, edits: Sequence[NounEdits], unknown: Collection[str] = ()) -> str:
    """A prompt in one line of HTML, with a button for every noun that can be edited.

    Args:
        prompt: the prompt.
        edits: its nouns, in reading order.
        unknown: words that the model does not know, in lower case; they are underlined.
    """
    parts, at = [], 0
    for noun in edits:
        place = " ".join(str(len(prompt[:i].encode("utf-16-le")) // 2) for i in (noun.start, noun.end))  # as scripts do
        removed, colours = escape(noun.removed, quote=True), escape(json.dumps(noun.recoloured), quote=True)
        parts.append(
            f"{_underlined(prompt[at : noun.start], unknown)}"
            f'<button type="button" class="noun" aria-haspopup="menu" title="Swap, remove or recolour" '
            f'data-at="{place}" data-removed="{removed}" data-colours="{colours}">'
            f"{_underlined(prompt[noun.start : noun.end], unknown)}</button>"
        )
        at = noun.end
    return "".join([*parts, _underlined(prompt[at:], unknown)])


def tokens(counts: Sequence[int], room: int) -> str:
    """Return the number of tokens of a prompt, in one line of HTML; one too long to be read at once is warned of.

    Args:
        counts: tokens of each part that the text encoder reads by itself.
        room: tokens that a part has at most.
    """
    if len(counts) == 1:
        return f"<span>{counts[0]} of {room} tokens</span>" if counts[0] else ""
    more = f"read in {len(counts)} parts of at most {room}"
    if len(counts) > MAX_CHUNKS:
        more = f"only the first {sum(counts[:MAX_CHUNKS])} are read"
    return f'<span class="long">{sum(counts)} tokens: {more}</span>'


def examples(vocabulary: Vocabulary | None) -> str:
    """Buttons with a model's example prompts, which the page's script puts into the prompt."""
    prompts = vocabulary.examples if vocabulary else ()
    buttons = "".join(f'<button type="button">{escape(prompt)}</button>' for prompt in prompts)
    return f'<div role="group" aria-label="Prompts to try">{buttons}</div>' if buttons else ""


def estimate(edit: EditEstimate) -> str:
    """The prediction of an edit, in one line of HTML."""
    preview = edit.preview
    if preview.nothing:
        return _line(f"Nothing to do: {preview.nothing}.")
    if preview.fallback:
        happens = dense_run_as_text(preview.mask)
        return _line(f"{happens[0].upper()}{happens[1:]}: {preview.fallback}.", *preview.notes)
    confidence = (
        f"confidence {preview.confidence:.0%}" if preview.mask.source is MaskSource.ATTENTION else "where you marked"
    )
    unsure = "unsure where: pick it or paint over it, and that alone is edited"
    advice = unsure if views.is_unsure(preview.mask) else ""
    work = _work_as_text(preview.macs_dense, preview.macs)
    area = views.area_of(preview.mask, edit.size, edit.crop)
    share = f"{area:.0%}" if area >= 0.005 else "less than 1%"
    erases = (
        "" if preview.diff.kind is not EditKind.IDENTICAL else "Erase leaves what lies outside: see that it covers all"
    )
    told = _line(f"{share} of the picture", confidence, work, erases, *preview.notes)
    return f'{told} · <span class="unsure">{advice}</span>' if advice else told


def cost_summary(
    result: EditResult,
    parent: EditResult | None,
    full_seconds: float | None,
    *,
    source: EditResult | None = None,
    source_text: str = "",
    unavailable: str = "",
) -> str:
    """The cost of a result and what it left unchanged, in one line of HTML.

    Args:
        result: result of any run.
        parent: what it was made from; None for a source.
        full_seconds: measured seconds of a run that computes the whole picture; None where none was measured.
        source: the new picture that it goes back to, whose seconds are told beside; None for none.
        source_text: model and LoRAs of a source, or "".
        unavailable: why it cannot be edited, or "".
    """
    stats = result.stats
    total = stats.seconds["total"]
    if parent is None:
        seed = "" if result.config.opened else f"seed {result.config.seed}"
        next_step = "" if result.prompt else UNDESCRIBED.replace("Then mark", "Mark")
        told = _line("A new picture", _seconds_as_text(total, "in "), seed, source_text, *stats.notes, unavailable)
        return " · ".join(filter(None, (told, _line(next_step))))
    if not (stats.unet_evaluations_sparse or stats.unet_evaluations_dense):
        return _line(*stats.notes, outside_as_text(parent, result), unavailable)
    work = _work_as_text(stats.macs_dense, stats.macs)
    whole = _seconds_as_text(full_seconds, "in full ", " (measured)")
    if full_seconds is None and source is not None and not source.config.opened:
        whole = _seconds_as_text(source.stats.seconds["total"], "the new picture took ")
    outside = outside_as_text(parent, result)
    seed = f"seed {result.config.seed}" if result.config.seed != parent.config.seed else ""
    return _line(_seconds_as_text(total), whole, work, outside, seed, *stats.notes, unavailable)


def outside_as_text(parent: EditResult, result: EditResult) -> str:
    """Return as text whether every pixel outside the mask is the parent's, compared pixel by pixel."""
    if result.mask.grid.all():
        return "the mask is the whole picture"
    return "outside the mask: changed" if result.changed_outside(parent) else "outside the mask: identical"


def progress(run: RunProgress) -> str:
    """A run's progress as HTML, with the time left."""
    done, left = f"step {run.step} of {run.steps}", _seconds_as_text(run.seconds_left, "", " left")
    text = escape(", ".join(filter(None, (done, left))))
    return f'<div class="run"><progress max="{run.steps}" value="{run.step}"></progress><span>{text}</span></div>'


OWN_WORDS = '<button type="button" class="own">Reset words</button>'
"""The button by which the page's script puts the current picture's prompt back."""

UNDESCRIBED = "Then mark a place, and say what shall be there."
"""The sentence about a picture that is opened without a description."""

EARLIER = '<div class="earlier" role="group" aria-label="Earlier sessions" hidden></div>'
"""The place in which the page's script lists the browser's other sessions."""


def message(words: str, kind: str = "") -> str:
    """A sentence for the status line.

    Args:
        words: the sentence; "" for none.
        kind: "error" for what went wrong with something that the user gave, until they change it; "error lasting" for
            what went wrong otherwise; "again" for a refusal after which the page's script asks again; else "".
    """
    role = "alert" if kind.startswith("error") else "status"
    return f'<p class="said {kind}" role="{role}">{escape(words)}</p>' if words else ""


def waiting_picture(notes: str, *, ask: bool) -> str:
    """Return the message about a picture that waits on the stage to be opened, as HTML.

    Args:
        notes: what the file says, and what becomes of the picture.
        ask: whether its file does not say what it shows.
    """
    hint = f"Open it (Ctrl+Enter). {UNDESCRIBED} To edit it by words alone, say as the prompt what it shows." * ask
    return f'<div class="waiting"{" data-ask" * ask}>{message(f"{hint} {notes}".strip())}</div>'


def tree(history: History, current: str | None) -> str:
    """The history as HTML: sources begin rows, edits follow to the right, further branches stand below."""
    places = layout(history)
    parts = []
    for number, result in enumerate(history.steps, 1):
        before = history.step_before(result)
        column, row = places[result.id]
        aria = ' aria-current="true"' if result.id == current else ""
        origin = "a source" if before is None else caption(result, before)
        name = escape(f"Picture {number}, {origin}: {result.prompt}", quote=True)
        short = escape(caption(result, before))
        rows_up = row - places[before.id][1] if before is not None else 0
        direction = "root" if before is None else "branch" if rows_up else "on"
        parts.append(
            f'<button type="button" class="node" data-id="{result.id}" title="{name}" aria-label="{name}"{aria} '
            f'style="grid-column:{column + 1};grid-row:{row + 1};--up:{rows_up}" data-way="{direction}">'
            f'<img src="{views.thumbnail_url(result)}" alt="" loading="lazy"><span>{short}</span></button>'
        )
    return f'<div class="tree" role="group" aria-label="History">{"".join(parts)}</div>' if parts else ""


def candidates(results: Sequence[EditResult], current: str | None) -> str:
    """The results to choose from, as a row in HTML; "" for none.

    Args:
        results: the candidates.
        current: id of the result on the stage.
    """
    parts = []
    for number, result in enumerate(results, 1):
        aria = ' aria-current="true"' if result.id == current else ""
        name = f"Candidate {number}, seed {result.config.seed} (key {number})"
        parts.append(
            f'<button type="button" data-id="{result.id}" title="{name}" aria-label="{name}"{aria}>'
            f'<img src="{views.thumbnail_url(result)}" alt=""><kbd>{number}</kbd></button>'
        )
    return f'<div class="candidates" role="group" aria-label="Candidates">{"".join(parts)}</div>' if parts else ""


def layout(history: History) -> dict[str, tuple[int, int]]:
    """(column, row) of every step, by id: depth, and one row for each branch."""
    children: dict[str | None, list[str]] = {}
    for result in history.steps:
        before = history.step_before(result)
        children.setdefault(None if before is None else before.id, []).append(result.id)
    places: dict[str, tuple[int, int]] = {}
    pending, row = [(name, 0, True) for name in reversed(children.get(None, []))], -1
    while pending:  # depth first; a first child stays in its parent's row
        name, column, starts_row = pending.pop()
        row += starts_row
        places[name] = column, row
        below = children.get(name, [])
        pending += [(child, column + 1, child != below[0]) for child in reversed(below)]
    return places


def caption(result: EditResult, before: EditResult | None = None) -> str:
    """A caption of a few letters, of a result and the step before it."""
    if before is not None and before.size != result.size:
        return "larger"
    words = result.prompt if result.parent is None else _change(result)
    return words.replace(" -> ", " \N{RIGHTWARDS ARROW} ") or "a picture"


def _change(result: EditResult) -> str:
    """Return the change of an edit: its words, or its seed where they stayed; its prompt where it changed nothing."""
    if result.diff.kind is not EditKind.IDENTICAL:
        return str(result.diff)
    return f"seed {result.config.seed}" if result.mask.grid.any() else result.prompt


def _line(*parts: str) -> str:
    return " · ".join(f"<span>{escape(part)}</span>" for part in parts if part)


def _seconds_as_text(seconds: float | None, before: str = "", after: str = "") -> str:
    if seconds is None:
        return ""
    text = f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
    return f"{before}{text}{after}"


def _work_as_text(full: int, spent: int) -> str:
    """Return how much less arithmetic an edit is than a run that computes the whole picture; "" if it is no less."""
    times = full / spent if spent else 0.0
    return f"{times:.1f} times less arithmetic" if times >= 1.05 else ""
