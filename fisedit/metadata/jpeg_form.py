"""The form of a JPEG, which is written again as it was: its quantization tables and how its chroma is sampled.

With them the pixels that were not edited keep their values within a level or two. Knows Pillow and numpy, no files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Plane = NDArray[np.float32]

FORM_CHUNK = b"jpFM"
"""A private chunk of a session's PNG, which holds a form."""

_TABLE, _SIDE = 64, 8
_SHAPES = ((1, _TABLE), (3, _TABLE), (4, _TABLE))
"""Components and entries of a form's tables."""

_ON_ITS_SIDE = (5, 6, 7, 8)
"""EXIF orientations that exchange width and height."""

_SUBSAMPLING = {(1, 1): 0, (2, 1): 1, (2, 2): 2}
"""Luma samples per chroma sample across and down -> Pillow's number for it; it writes no others."""

_DEFAULT = {"quality": 95}
_BAND = 512
"""Rows that are converted at once; an even number."""

_TO_CHROMA = np.array([[-0.168735892, -0.331264108, 0.5], [0.5, -0.418687589, -0.081312411]], np.float32)
_TO_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
"""The conversion of JFIF."""


@dataclass(frozen=True)
class JpegForm:
    """The form in which a JPEG stores its pixels.

    Args:
        tables: Quantization table of each component, row by row.
        sampling: Luma samples per chroma sample, across and down.
        progressive: Whether it is progressive.
        rgb: Whether its components are red, green and blue.
    """

    tables: tuple[tuple[int, ...], ...]
    sampling: tuple[int, int] = (1, 1)
    progressive: bool = False
    rgb: bool = False


def read_form(picture: Image.Image) -> JpegForm | None:
    """The form of an opened JPEG, None for another picture."""
    if not isinstance(picture, JpegImageFile):
        return None
    tables = [picture.quantization.get(layer[3], ()) for layer in picture.layer]
    if any(len(table) != _TABLE for table in tables) or (len(tables), _TABLE) not in _SHAPES:
        return None
    (_, across, down, _), (_, *others, _) = (
        picture.layer[0],
        picture.layer[-1] if len(tables) == 3 else picture.layer[0],
    )
    sampling = (across // max(1, others[0]), down // max(1, others[1]))
    rgb = len(tables) == 3 and picture.info.get("adobe_transform") == 0
    return JpegForm(tuple(map(tuple, tables)), sampling, "progressive" in picture.info, rgb)


def form_to_bytes(form: JpegForm) -> bytes:
    """A form as JSON, for `FORM_CHUNK`."""
    return json.dumps(asdict(form)).encode()


def form_from_bytes(data: bytes) -> JpegForm | None:
    """The form of an untrusted JSON, None for what is none."""
    try:
        told = json.loads(data)
        tables = np.asarray(told["tables"])
        across, down = (int(value) for value in told["sampling"])
        is_form = tables.dtype == np.int64 and tables.shape in _SHAPES and tables.min() > 0 and tables.max() < 2**16
        rows = tuple(map(tuple, tables.tolist())) if is_form else ()
        form = JpegForm(rows, (across, down), told["progressive"] is True, told["rgb"] is True)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None
    return form if is_form else None


def upright_form(form: JpegForm, picture: Image.Image) -> JpegForm:
    """The form of a picture after it is turned as its EXIF orientation says: so are its blocks."""
    if picture.getexif().get(ExifTags.Base.Orientation) not in _ON_ITS_SIDE:
        return form
    turned = (np.reshape(table, (_SIDE, _SIDE)).T.ravel().tolist() for table in form.tables)
    return replace(form, tables=tuple(map(tuple, turned)), sampling=form.sampling[::-1])


def in_form(image: Image.Image, form: JpegForm | None) -> tuple[Image.Image, dict[str, Any]]:
    """An image and Pillow's options that write it as a JPEG of a form.

    Args:
        image: An image of mode L, RGB or CMYK.
        form: The form; of None, or of other components than the image has, a JPEG of quality 95 is written.
    """
    if form is None or len(form.tables) != len(image.getbands()):
        return image, dict(_DEFAULT)
    tables = [
        list(table) for number, table in enumerate(form.tables) if not number or {*form.tables[number - 1 :]} - {table}
    ]
    options: dict[str, Any] = {"qtables": tables, "progressive": form.progressive}
    if image.mode != "RGB":  # Pillow stores CMYK without a conversion, so that the first table suits all components
        return image, options | {"qtables": tables[:1]}
    if form.rgb:
        return image, options | {"keep_rgb": True}
    subsampling = _SUBSAMPLING.get(form.sampling, 0)
    return _subsampled(image, form.sampling) if subsampling else image, options | {"subsampling": subsampling}


def _subsampled(image: Image.Image, sampling: tuple[int, int]) -> Image.Image:
    """A YCbCr image with equal chroma in every cell of a sampling: the one that decoders interpolate to the image's.

    An encoder takes means, and a decoder interpolates, so that every further JPEG would lose some chroma. Hence the
    interpolation's mean is solved for what is stored.
    """
    across, down = sampling
    pixels, planes = np.asarray(image), []
    result = np.empty_like(pixels)
    for top in range(0, image.height, _BAND):
        band = pixels[top : top + _BAND].astype(np.float32)
        result[top : top + _BAND, :, 0] = np.rint(band @ _TO_LUMA)
        planes.append(_means(band @ _TO_CHROMA.T + np.float32(128), across, down))
    chroma = _solved(np.concatenate(planes), 1)
    chroma = np.rint(_solved(chroma, 0) if down > 1 else chroma).clip(0, 255).astype(np.uint8)
    result[..., 1:] = chroma.repeat(down, 0).repeat(across, 1)[: image.height, : image.width]
    ycbcr = Image.fromarray(result, "YCbCr")
    ycbcr.info = image.info
    return ycbcr


def _means(plane: Plane, across: int, down: int) -> Plane:
    """Means of cells [h, w, C]; those at the right and bottom edge repeat the last pixels."""
    height, width, channels = plane.shape
    padded = np.pad(plane, ((0, -height % down), (0, -width % across), (0, 0)), "edge")
    cells = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // across, across, channels)
    means: Plane = cells.mean((1, 3), dtype=np.float32)
    return means


def _solved(means: Plane, axis: int) -> Plane:
    """The samples along an axis from the means of what a decoder interpolates from them.

    It weights a sample by 3/4 and the neighbour on a pixel's side by 1/4; at an edge a sample neighbours itself.
    """
    from scipy.linalg import solveh_banded

    moved = np.moveaxis(means, axis, 0)
    count = len(moved)
    if count == 1:
        return means
    bands = np.full((2, count), 0.125, np.float32)
    bands[1], bands[1, [0, -1]] = 0.75, 0.875
    solution = solveh_banded(bands, moved.reshape(count, -1), overwrite_b=False, check_finite=False)
    return np.moveaxis(solution.reshape(moved.shape).astype(np.float32), 0, axis)
