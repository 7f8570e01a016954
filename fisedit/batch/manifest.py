"""Finds the items of a job: every image with its prompts, mask and output, and what is left out.

Reads names, texts and the first bytes of files without a picture's suffix; decodes no image.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from fisedit.batch.input_tables import EditRow, read_captions, read_edits
from fisedit.batch.values import BatchItem, BatchJob, OutputFormat
from fisedit.errors import InputError
from fisedit.prompts.syntax import check_syntax
from fisedit.storage.file_kinds import OTHER, file_kind
from fisedit.storage.files import IMAGE_FORMATS

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".webp", ".bmp", ".tif", ".tiff", ".gif")
"""Suffixes of files that are edited, and fail if they are no pictures; others are where they hold one. Hidden files
are not."""

_UNREADABLE = (
    *(".psd", ".eps", ".svg", ".pdf", ".heic", ".avif", ".jxl", ".ico", ".tga"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".pef", ".srw", ".raf"),  # a TIFF's picture is a preview
)
"""Suffixes of image files that are never opened."""

_TEXTS = (".txt", ".caption")
"""Suffixes of texts beside pictures, the first that is there counts."""

_OTHER_FORMATS = "left out, as they are of other formats"
_UNUSED_TEXTS = "texts beside pictures not read, as others are"

_JPEG = OutputFormat.JPG
_FORMAT_OF = {
    ".png": OutputFormat.PNG,
    ".webp": OutputFormat.WEBP,
    **dict.fromkeys((".jpg", ".jpeg", ".jfif", ".jpe"), _JPEG),
}
_MAX_SIDECAR_BYTES = 1 << 16
_Names: TypeAlias = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class BatchPlan:
    """The items of a job.

    Args:
        items: One for each output.
        notes: Remarks for the user on tables and folders.
    """

    items: tuple[BatchItem, ...]
    notes: tuple[str, ...] = ()


def plan_batch(job: BatchJob) -> BatchPlan:
    """Find the images of a job and the prompts and masks of each.

    Args:
        job: Inputs and outputs. An error of a single image becomes its item's `problem`.

    Raises:
        InputError: A folder or table that cannot be used, contradicting options, or nothing to do.
    """
    _check_job(job)
    notes: list[str] = []
    captions = read_captions(job.captions) if job.captions else {}
    if job.edits:
        rows: Sequence[EditRow] = read_edits(job.edits)
    else:
        assert job.prompt is not None
        rows = [EditRow(name, job.prompt) for name in sorted(_find_images(job, notes))]
        if not rows:
            hint = "" if job.recursive else "; use --recursive for its subfolders"
            found = "".join(f" ({note})" for note in notes)
            raise InputError(f"IN must hold pictures ({', '.join(SUFFIXES)}), got none in {job.folder}{found}{hint}")
    if unused := sorted(set(captions) - {row.image for row in rows}):
        notes.append(f"captions for pictures that are not edited: {len(unused)}, such as {unused[0]}")
    outputs = _name_outputs(rows, job.format)
    names = cache(_names_by_stem)
    items = [_make_item(job, row, output, captions, names) for row, output in zip(rows, outputs, strict=True)]
    notes += _mask_notes(job, items)
    return BatchPlan(tuple(_mark_conflicts(items)), tuple(notes))


def _check_job(job: BatchJob) -> None:
    if (job.prompt is None) == (job.edits is None):
        raise InputError("give either --prompt or --edits, got both or none; see fisedit batch --help")
    for name, prompt in (("--prompt", job.prompt), ("--source-prompt", job.source_prompt)):
        if prompt is not None and not isinstance(prompt, str):
            raise InputError(f"{name} must be text, got {type(prompt).__name__}")
        check_syntax(prompt or "", name)
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


def _find_images(job: BatchJob, notes: list[str]) -> Iterator[str]:
    """Names of image files; links to folders are not followed, outputs and masks are left out."""
    excluded = {folder.resolve() for folder in (job.output, job.masks) if folder}
    left = defaultdict[str, list[str]](list)

    def on_error(error: OSError) -> None:
        if Path(error.filename) == job.folder:
            raise InputError(f"IN must be readable, got {job.folder} ({error.strerror})") from error
        notes.append(f"folder left out, as it cannot be read ({error.strerror}): {error.filename}")

    for root, folders, names in os.walk(job.folder, onerror=on_error):
        here = [Path(root, name) for name in folders if Path(root, name).resolve() not in excluded]
        folders[:] = [path.name for path in here if not _why_no_folder(path, job)]
        for path in here:
            left[_why_no_folder(path, job)].append(_in(job, path))
        yield from _sort_files(job, [Path(root, name) for name in names], left)
    advice = {_OTHER_FORMATS: "; save them as PNG"}
    lists = [(why, found) for why, found in sorted(left.items()) if why]
    notes += [f"{why}: {len(found)}, such as {min(found)}{advice.get(why, '')}" for why, found in lists]


def _why_no_folder(path: Path, job: BatchJob) -> str:
    """Return why a folder inside is not looked into, in words; "" if it is."""
    if path.name.startswith("."):
        return "hidden folders left out"
    if path.is_symlink():
        return "links to folders left out, as they are not followed"
    return "" if job.recursive else "subfolders left out, as --recursive is not given"


def _sort_files(job: BatchJob, paths: Sequence[Path], left: dict[str, list[str]]) -> Iterator[str]:
    """The names of images among the files of a folder; those of others are added to what is left out."""
    images = {path for path in paths if _is_image(path)}
    yield from (_in(job, path) for path in images)
    stems, has_words = {path.stem for path in images}, job.source_prompt or job.captions
    texts = {path for path in paths if path.stem in stems and path.suffix.lower() in _TEXTS}
    read = set() if has_words else {min(group, key=_rank).name for group in _by_stem(texts)}
    for path in set(paths) - images:
        why = ("" if path.name in read else _UNUSED_TEXTS) if path in texts else _why_no_image(path, job)
        left[why].append(_in(job, path))


def _by_stem(paths: Iterable[Path]) -> Iterable[list[Path]]:
    groups = defaultdict[str, list[Path]](list)
    for path in paths:
        groups[path.stem].append(path)
    return groups.values()


def _rank(path: Path) -> tuple[int, bool]:
    """The order in which texts beside a picture are looked for: small letters before capitals, as `_find_beside`."""
    return _TEXTS.index(path.suffix.lower()), path.suffix != path.suffix.lower()


def _in(job: BatchJob, path: Path) -> str:
    return str(PurePosixPath(path.relative_to(job.folder)))


def _is_image(path: Path) -> bool:
    """Return whether a file is to be edited: it has a picture's suffix, or holds one."""
    if path.name.startswith(".") or path.suffix.lower() in (*_UNREADABLE, *_TEXTS):
        return False
    return path.suffix.lower() in SUFFIXES or file_kind(path) not in ("", OTHER)


def _why_no_image(path: Path, job: BatchJob) -> str:
    """Return why a file is left out, in words; "" for files that are no inputs."""
    if path.is_symlink() and not path.exists():
        return "links to nowhere left out"
    kind = file_kind(path)
    if path.name.startswith("."):
        return "hidden pictures left out" if kind or path.suffix.lower() in SUFFIXES else ""
    if path.suffix.lower() in _UNREADABLE or kind == OTHER:
        return _OTHER_FORMATS
    tables = {table.resolve() for table in (job.captions, job.edits) if table}
    return "" if path.resolve() in tables else "files left out, as they are no pictures"


def _name_outputs(rows: Sequence[EditRow], kind: OutputFormat) -> list[str]:
    """Names of outputs: the input's name with the format's suffix.

    The old suffix is kept inside where two names would be equal, and several edits of one image are numbered.
    """
    images = dict.fromkeys(row.image for row in rows)
    default_names = {image: str(PurePosixPath(image).with_suffix(_suffix(image, kind))) for image in images}
    uses = Counter(default_names.values())
    names = {
        image: name if uses[name] == 1 or name == image else image + _suffix(image, kind)
        for image, name in default_names.items()
    }
    edits, numbers = Counter(row.image for row in rows), Counter[str]()
    outputs = []
    for row in rows:
        path = PurePosixPath(names[row.image])
        numbers[row.image] += 1
        numbered = path if edits[row.image] == 1 else path.with_stem(f"{path.stem}-{numbers[row.image]}")
        outputs.append(row.output or str(numbered))
    return outputs


def _suffix(image: str, kind: OutputFormat) -> str:
    """The suffix of an output: the input's own if it has the wanted format."""
    own = PurePosixPath(image).suffix
    if kind is OutputFormat.KEEP:
        return own if own.lower() in IMAGE_FORMATS else ".png"
    return own if _FORMAT_OF.get(own.lower()) is kind else f".{kind}"


def _make_item(
    job: BatchJob, row: EditRow, output: str, captions: dict[str, str], names: Callable[[Path], _Names]
) -> BatchItem:
    picture = job.folder / row.image
    problem = _file_problem(picture, "picture")
    if not problem and PurePosixPath(output).suffix.lower() not in IMAGE_FORMATS:
        problem = f"output must end in {', '.join(IMAGE_FORMATS)}, got {output}"
    source, source_problem = _source_prompt(job, row, captions, names)
    mask = _mask_path(job, row, names)
    problem = problem or source_problem or (_file_problem(mask, "mask") if mask else "")
    prompt = row.prompt.replace("{source}", source or "")
    if not problem and not source and "{source}" in row.prompt:
        problem = "a prompt with {source} needs what the picture shows, got none; give captions or a source prompt"
    return BatchItem(picture, row.image, source, prompt, mask, output, job.output / output, problem)


def _file_problem(path: Path, what: str) -> str:
    """Return why a path cannot be read as a file, or ""; nothing is opened."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"{what} cannot be read: {error.strerror}"
    return "" if stat.S_ISREG(mode) else f"{what} must be a plain file, got a {_kind(mode)}"


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _source_prompt(
    job: BatchJob, row: EditRow, captions: dict[str, str], names: Callable[[Path], _Names]
) -> tuple[str | None, str]:
    """The source prompt of an image, None if it has none; and the problem with it, or ""."""
    if prompt := row.source_prompt or job.source_prompt:
        return prompt, ""
    if job.captions:
        missing = "" if row.image in captions else f"{job.captions.name} has no caption for it"
        return captions.get(row.image), missing
    path = _find_beside(job.folder / row.image, _TEXTS, names)
    return (None, "") if path is None else _read_sidecar(path)


def _read_sidecar(path: Path) -> tuple[str | None, str]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None, f"{path.name} beside it must be a plain file"
        with path.open("rb") as file:
            text = file.read(_MAX_SIDECAR_BYTES + 1)
        prompt = text.decode("utf-8-sig").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, f"{path.name} beside it cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return None, f"{path.name} beside it must be UTF-8 text"
    if not prompt or len(text) > _MAX_SIDECAR_BYTES:
        amount = "too much" if prompt else "nothing"
        return None, f"{path.name} beside it must say what the picture shows, got {amount}"
    return prompt, ""


def _mask_path(job: BatchJob, row: EditRow, names: Callable[[Path], _Names]) -> Path | None:
    """The row's own mask, or one in the folder of masks with the image's name and any suffix."""
    if row.mask:
        return (job.masks or job.folder) / row.mask
    if job.masks is None:
        return None
    path = job.masks / row.image
    if os.path.lexists(path):
        return path
    return _find_beside(path, SUFFIXES, names) or _holding_a_picture(path, names)


def _holding_a_picture(path: Path, names: Callable[[Path], _Names]) -> Path | None:
    """The first file with a path's name but for the suffix that holds a picture."""
    found = (path.with_name(name) for name in names(path.parent).get(path.stem, ()))
    return next((each for each in found if _is_image(each)), None)


def _find_beside(path: Path, suffixes: Sequence[str], names: Callable[[Path], _Names]) -> Path | None:
    """The file with a path's name but for the suffix, which is the first of these that is there, in any case."""
    found = names(path.parent).get(path.stem, ())
    with_suffixes = [name for suffix in suffixes for name in found if PurePosixPath(name).suffix.lower() == suffix]
    return path.with_name(with_suffixes[0]) if with_suffixes else None


def _names_by_stem(folder: Path) -> _Names:
    """The names in a folder, by what they are without their suffix; none of one that cannot be listed."""
    names = defaultdict[str, list[str]](list)
    try:
        found = sorted((path.name for path in folder.iterdir()), reverse=True)  # small letters before capitals
    except OSError:
        return {}
    for name in found:
        names[PurePosixPath(name).stem].append(name)
    return names


def _mask_notes(job: BatchJob, items: Sequence[BatchItem]) -> Iterator[str]:
    """Remarks on pictures and masks that have no counterpart."""
    if job.masks is None:
        return
    if bare := sorted({item.name for item in items} - {item.name for item in items if item.mask}):
        yield f"pictures without a mask: {len(bare)}, such as {bare[0]}; the changed words decide there"
    folders = [*os.walk(job.masks)] if job.recursive else [*islice(os.walk(job.masks), 1)]
    found = {Path(root, name) for root, _, names in folders for name in names} - {item.mask for item in items}
    unused = [path for path in found if _is_image(path)]
    if unused:
        yield f"masks that fit no picture: {len(unused)}, such as {min(unused).relative_to(job.masks)}"


def _mark_conflicts(items: Sequence[BatchItem]) -> Iterator[BatchItem]:
    """The items, with a problem for those whose output is an input or another item's output."""
    real_folder = cache(os.path.realpath)  # a hundred thousand files lie in a few folders

    def resolve(path: Path) -> Path:
        return Path(real_folder(path.parent), path.name)  # links to folders are followed, links to files are not

    paths = [path for item in items for path in (item.picture, item.mask) if path]
    inputs = {resolve(path) for path in paths} | {Path(os.path.realpath(path)) for path in paths}
    by_output = defaultdict[str, list[BatchItem]](list)
    for item in items:
        first = next(iter(by_output[item.output]), None)
        by_output[item.output].append(item)
        if not item.problem and resolve(item.target) in inputs:
            yield replace(item, problem=f"its output {item.output} would replace an input; choose another folder")
        elif not item.problem and first:
            yield replace(item, problem=f"its output {item.output} is that of {first.name} as well; rename one of them")
        else:
            yield item
