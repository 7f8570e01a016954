"""Files that the command line reads and writes. An output is complete or absent; an input is never modified.

Knows Pillow's formats and nothing of editing.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from fisedit.errors import InputError, MaskError

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.storage.image_metadata import Metadata

T = TypeVar("T")

_JPEG = {"format": "JPEG", "quality": 95}
_TIFF = {"format": "TIFF", "compression": "tiff_adobe_deflate"}
_FORMATS: Mapping[str, Mapping[str, Any]] = {
    ".png": {"format": "PNG"},
    ".webp": {"format": "WEBP", "lossless": True, "exact": True},
    ".jpg": _JPEG,
    ".jpeg": _JPEG,
    ".tif": _TIFF,
    ".tiff": _TIFF,
}
_MODES = {
    "PNG": ("1", "L", "LA", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK"),
    "TIFF": ("L", "LA", "RGB", "RGBA", "CMYK", "I;16"),
}
"""What a format holds without loss of depth, alpha or colours."""

IMAGE_SUFFIXES = tuple(_FORMATS)
"""Endings of images that are written."""

_READABLE = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
_MOST_PIXELS = 64_000_000
_STEM = 40  # letters of a file's name in that of its unfinished copy


def image_output(path: Path, *inputs: Path | None) -> Path:
    """Check, before any work, that an image can be written to `path` and is none of the `inputs`.

    Raises:
        InputError: the ending is unknown, the place cannot be written, or it is an input.
    """
    if path.suffix.lower() not in _FORMATS:
        raise InputError(f"output must end in {', '.join(_FORMATS)}, got {path}")
    if path.is_dir():
        raise InputError(f"output must be a file, got the folder {path}")
    if any(given is not None and path.resolve() == given.resolve() for given in inputs):
        raise InputError(f"output must not be an input, got {path} for both; choose another name")
    writable(path.parent)
    return path


def page_output(path: Path | None) -> None:
    """Check, before any work, that an HTML page can be written to `path`, if there is one.

    Raises:
        InputError: another ending, or a place that cannot be written.
    """
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise InputError(f"report must be an .html file, got {path}")
    writable(path.parent)


def writable(folder: Path) -> Path:
    """Check that `folder` is there, or can be made, and takes files.

    Raises:
        InputError: it does not.
    """
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=nearest):  # permissions alone tell neither read-only disks nor full ones
            return folder
    except OSError as error:
        raise InputError(f"output folder must be writable, got {nearest} ({error.strerror}); choose another") from error


def write_image(image: Image, path: Path, made: Metadata | None = None) -> tuple[str, ...]:
    """Write an image in the format of its file's ending, with its colour profile and metadata, whole or not at all.

    What the format cannot hold is written as a screen shows it: 8-bit sRGB, and in a JPEG over white.

    Args:
        made: how it was made, to be told as well.

    Returns:
        What was lost.
    """
    return _write(path, lambda file: _save(image, path.suffix, file, made))


def image_bytes(image: Image, suffix: str, made: Metadata | None = None) -> tuple[bytes, tuple[str, ...]]:
    """The bytes that `write_image` writes into a file with this ending, and what was lost."""
    file = BytesIO()
    lost = _save(image, suffix, file, made)
    return file.getvalue(), lost


def holds(suffix: str, image: Image) -> bool:
    """Whether the format of an ending holds an image as it is."""
    return image.mode in _MODES[_FORMATS[suffix.lower()]["format"]]


def write_json(value: object, path: Path) -> None:
    """Write JSON, whole or not at all."""
    _write(path, lambda file: file.write(json.dumps(value, indent=2, default=str).encode() + b"\n"))


def write_bytes(data: bytes, path: Path) -> None:
    """Write bytes, whole or not at all."""
    _write(path, lambda file: file.write(data))


def remove_partial(folder: Path, names: Collection[str]) -> None:
    """Remove the unfinished copies that killed writes left in a folder.

    Args:
        folder: The folder.
        names: Names of the files that were written; none of them may be being written now.
    """
    stems = {Path(name).stem[:_STEM] for name in names}
    for part in folder.glob(".*.part"):
        if part.name[1:].rpartition("-")[0] in stems:
            part.unlink(missing_ok=True)


def write_text(text: str, path: Path) -> None:
    """Write text as UTF-8, whole or not at all."""
    _write(path, lambda file: file.write(text.encode()))


def read_mask(path: Path | None) -> Image | None:
    """Read a mask image as grey levels; None stays None.

    Raises:
        MaskError: there is no image, or one that is too large to be a mask.
    """
    if path is None:
        return None
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise MaskError(f"mask must be an image file, got {path}: no such file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit here is lower
        try:
            with Image.open(path, formats=_READABLE) as image:
                _check_size(image)
                return _grey(image)
        except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise MaskError(f"mask must be a {', '.join(_READABLE)} image, got {path}: damaged or another") from error


def _check_size(image: Image) -> None:
    if image.width * image.height > _MOST_PIXELS:
        raise MaskError(f"mask must have the picture's size, got {image.width}x{image.height} pixels")


def _grey(image: Image) -> Image:
    """Grey levels 0 to 255; 16-bit ones are scaled, where Pillow would clip them."""
    if image.mode.startswith("I"):
        return image.point(lambda level: level / 257, "F").convert("L")
    return image.convert("L")


def _save(image: Image, suffix: str, file: IO[bytes], made: Metadata | None) -> tuple[str, ...]:
    from fisedit.storage import image_metadata

    options, shown = _FORMATS[suffix.lower()], image
    lost: tuple[str, ...] = ()
    if not holds(suffix, image):
        from fisedit.storage.images import on_screen

        shown = on_screen(image, alpha=options["format"] != "JPEG")
        lost = (f"{suffix} holds no {image.mode}: written as a screen shows it",)
    told, left = image_metadata.options(image, options["format"], made or image_metadata.Metadata())
    shown.save(file, **{**options, **told}, icc_profile=shown.info.get("icc_profile"))
    return lost + left


def _write(path: Path, write: Callable[[IO[bytes]], T]) -> T:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.stem[:_STEM]}-", suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o666 & ~_umask())
        part.replace(path)
        _sync(path.parent)
        return result
    finally:
        part.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Bring a folder's new names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's mask of file permissions; the system tells it only by setting another."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
