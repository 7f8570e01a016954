"""A job -> its items: every picture with its prompts, mask and output. Reads names and texts, opens no picture."""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath

from fisedit.batch.tables import EditRow, read_captions, read_edits
from fisedit.batch.values import Format, Item, Job
from fisedit.errors import InputError
from fisedit.storage.files import IMAGE_SUFFIXES

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
"""Endings of what is taken for a picture; hidden files are not."""

_STRANGE = (".psd", ".eps", ".svg", ".pdf", ".heic", ".avif", ".jxl", ".ico", ".tga")
"""Endings of pictures that are never opened."""

_MEANS = {".png": Format.PNG, ".jpg": Format.JPG, ".jpeg": Format.JPG, ".webp": Format.WEBP}
_MOST_BYTES = 1 << 16  # of a caption beside a picture


@dataclass(frozen=True)
class Plan:
    """The items of a job, and what the user should know of its tables and folders."""

    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()


def make_plan(job: Job) -> Plan:
    """Find the pictures and all that is said about them.

    What is wrong with one picture becomes its item's `problem`.

    Raises:
        InputError: a folder or table that cannot be used, contradicting options, or nothing to do.
    """
    _check(job)
    notes: list[str] = []
    captions = read_captions(job.captions) if job.captions else {}
    if job.edits:
        rows: Sequence[EditRow] = read_edits(job.edits)
    else:
        assert job.prompt is not None
        rows = [EditRow(name, job.prompt) for name in sorted(_pictures(job, notes))]
        if not rows:
            deeper = "" if job.recursive else "; use --recursive for its subfolders"
            raise InputError(f"IN must hold pictures ({', '.join(SUFFIXES)}), got none in {job.folder}{deeper}")
    if strangers := sorted(set(captions) - {row.image for row in rows}):
        notes.append(f"captions for pictures that are not edited: {len(strangers)}, such as {strangers[0]}")
    outputs = _outputs(rows, job.format)
    items = [_item(job, row, output, captions) for row, output in zip(rows, outputs, strict=True)]
    return Plan(tuple(_apart(job, items)), tuple(notes))


def _check(job: Job) -> None:
    if (job.prompt is None) == (job.edits is None):
        raise InputError("give either --prompt or --edits, got both or none; see fisedit batch --help")
    if job.prompt is not None and not job.prompt.strip():
        raise InputError("--prompt must say something, got nothing; describe the changed picture")
    if job.source_prompt is not None and job.captions is not None:
        raise InputError("give either --source-prompt or --captions, got both")
    for name, folder in (("IN", job.folder), ("--masks", job.masks)):
        if folder is not None and not folder.is_dir():
            raise InputError(f"{name} must be a folder, got {folder}: {'a file' if folder.exists() else 'not there'}")
    if os.path.lexists(job.output) and not job.output.is_dir():
        raise InputError(f"OUT must be a folder, got the file {job.output}")
    if os.path.realpath(job.output) in {os.path.realpath(folder) for folder in (job.folder, job.masks) if folder}:
        raise InputError(f"OUT must not be a folder of inputs, got {job.output} for both; choose another")


def _pictures(job: Job, notes: list[str]) -> Iterator[str]:
    """Names of what looks like a picture; links to folders are not followed, outputs and masks are not inputs."""
    inner = {folder.resolve() for folder in (job.output, job.masks) if folder}
    strange = []

    def unreadable(error: OSError) -> None:
        if Path(error.filename) == job.folder:
            raise InputError(f"IN must be readable, got {job.folder} ({error.strerror})") from error
        notes.append(f"folder left out, as it cannot be read ({error.strerror}): {error.filename}")

    for root, folders, names in os.walk(job.folder, onerror=unreadable):
        kept = [name for name in folders if not name.startswith(".") and Path(root, name).resolve() not in inner]
        folders[:] = kept if job.recursive else []
        for name in names:
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield str(PurePosixPath(Path(root, name).relative_to(job.folder)))
            elif name.lower().endswith(_STRANGE):
                strange.append(name)
    if strange:
        notes.append(f"left out, as they are of other formats: {len(strange)}, such as {strange[0]}; save them as PNG")


def _outputs(rows: Sequence[EditRow], kind: Format) -> list[str]:
    """Names of outputs: the picture's; with its old ending inside where two would meet; with a number where a picture
    has several edits."""
    images = dict.fromkeys(row.image for row in rows)
    plain = {image: str(PurePosixPath(image).with_suffix(_suffix(image, kind))) for image in images}
    meet = Counter(plain.values())
    names = {
        image: name if meet[name] == 1 or name == image else image + _suffix(image, kind)
        for image, name in plain.items()
    }
    edits, seen = Counter(row.image for row in rows), Counter[str]()
    outputs = []
    for row in rows:
        path = PurePosixPath(names[row.image])
        seen[row.image] += 1
        numbered = path if edits[row.image] == 1 else path.with_stem(f"{path.stem}-{seen[row.image]}")
        outputs.append(row.output or str(numbered))
    return outputs


def _suffix(image: str, kind: Format) -> str:
    """The ending of an output: the picture's own wherever that means the wanted format."""
    own = PurePosixPath(image).suffix
    if kind is Format.KEEP:
        return own if own.lower() in IMAGE_SUFFIXES else ".png"
    return own if _MEANS.get(own.lower()) is kind else f".{kind}"


def _item(job: Job, row: EditRow, output: str, captions: dict[str, str]) -> Item:
    picture = job.folder / row.image
    problem = _no_file(picture, "picture")
    if not problem and PurePosixPath(output).suffix.lower() not in IMAGE_SUFFIXES:
        problem = f"output must end in {', '.join(IMAGE_SUFFIXES)}, got {output}"
    source, why = _source_prompt(job, row, captions)
    mask = _mask(job, row)
    problem = problem or why or (_no_file(mask, "mask") if mask else "")
    prompt = row.prompt.replace("{source}", source or "")
    if not problem and not prompt.strip():
        problem = "prompt must say something, got only {source} and no source prompt"
    return Item(picture, row.image, source, prompt, mask, output, job.output / output, problem)


def _no_file(path: Path, what: str) -> str:
    """Why a path cannot be read as a file, or ""; nothing is opened."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"{what} cannot be read: {error.strerror}"
    return "" if stat.S_ISREG(mode) else f"{what} must be a plain file, got a {_kind(mode)}"


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _source_prompt(job: Job, row: EditRow, captions: dict[str, str]) -> tuple[str | None, str]:
    """What a picture shows, None where nobody says; and why that is a problem, or ""."""
    said = row.source_prompt or job.source_prompt
    if said:
        return said, ""
    if job.captions:
        missing = "" if row.image in captions else f"{job.captions.name} has no caption for it"
        return captions.get(row.image), missing
    return _sidecar((job.folder / row.image).with_suffix(".txt"))


def _sidecar(path: Path) -> tuple[str | None, str]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None, f"{path.name} beside it must be a plain file"
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        said = text.decode("utf-8-sig").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, f"{path.name} beside it cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return None, f"{path.name} beside it must be UTF-8 text"
    if not said or len(text) > _MOST_BYTES:
        return None, f"{path.name} beside it must say what the picture shows, got {'too much' if said else 'nothing'}"
    return said, ""


def _mask(job: Job, row: EditRow) -> Path | None:
    """The row's own mask, or one in the folder of masks with the picture's name and any ending."""
    if row.mask:
        return (job.masks or job.folder) / row.mask
    if job.masks is None:
        return None
    path = job.masks / row.image
    return next((path for path in (path, *map(path.with_suffix, SUFFIXES)) if os.path.lexists(path)), None)


def _apart(job: Job, items: Sequence[Item]) -> Iterator[Item]:
    """The items, with a problem for those whose output is an input or another item's output."""
    folder = cache(os.path.realpath)  # of a hundred thousand files in a few folders

    def place(path: Path) -> Path:
        return Path(folder(path.parent), path.name)  # whatever links lead to its folder; a link is its own file

    given = [path for item in items for path in (item.picture, item.mask) if path]
    inputs = {place(path) for path in given} | {Path(os.path.realpath(path)) for path in given}
    takers = defaultdict[str, list[Item]](list)
    for item in items:
        first = next(iter(takers[item.output]), None)
        takers[item.output].append(item)
        if not item.problem and place(item.target) in inputs:
            yield replace(item, problem=f"its output {item.output} would replace an input; choose another folder")
        elif not item.problem and first:
            yield replace(item, problem=f"its output {item.output} is that of {first.name} as well; rename one of them")
        else:
            yield item
