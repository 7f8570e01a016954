"""Reads and writes the metadata of image files: how an image was made, and what its owner wrote into it.

How it was made is two texts: `parameters`, which Stable Diffusion's web UIs read, and `fisedit`, our own JSON. In a PNG
they are chunks of these names; elsewhere EXIF's UserComment, as in those UIs, and ImageHistory. The owner's metadata
are EXIF, XMP, a comment and a PNG's texts. Knows Pillow and where texts are stored; nothing of what they mean.
"""

from __future__ import annotations

import json
import re
import struct
import warnings
from dataclasses import dataclass
from typing import Any

from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

_PARAMETERS, _ORIGIN, _XMP = "parameters", "fisedit", "XML:com.adobe.xmp"
_TEXTS, _BEFORE = "texts", "parameters before"
_RESERVED_KEYS = {_PARAMETERS, _ORIGIN, _XMP, _BEFORE, "compression"}  # Pillow adds the last one for a TIFF
_XMP_ORIENTATION = re.compile(rb'\s*tiff:Orientation="[0-9]"|<tiff:Orientation>\s*[0-9]\s*</tiff:Orientation>')
_INFOTEXT = re.compile(r"^Steps: \d+, ", re.MULTILINE)

_COMMENT, _HISTORY = ExifTags.Base.UserComment, ExifTags.Base.ImageHistory
_DESCRIPTIVE_TAGS = set(range(0x010D, 0x0111)) | {0x011A, 0x011B, 0x0128, 0x0131, 0x0132, 0x013B, 0x013C}
"""TIFF tags that describe the image; the others of this range describe its storage."""
_IFDS = (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo)
_XMP_OF_TIFF = 0x02BC
_STORED_TAGS = {*_IFDS, ExifTags.Base.IPTCNAA, ExifTags.Base.ImageResources, ExifTags.Base.InterColorProfile}

_UNICODE, _CODE_BYTES = b"UNICODE\0", 8
_MAX_JPEG_BYTES = {"exif": 65_533, "xmp": 65_504, "comment": 65_533}
"""Greatest size of each in a JPEG."""

_DAMAGED = (ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error)
"""What Pillow raises for forged metadata."""


@dataclass(frozen=True)
class Metadata:
    """How an image was made.

    Args:
        parameters: Prompt and settings as AUTOMATIC1111's web UI writes them, or "".
        origin: The JSON of `storage.provenance`, or "".
    """

    parameters: str = ""
    origin: str = ""


def read_metadata(picture: Image.Image) -> Metadata:
    """The unchecked metadata of an opened file; "" for texts that are missing or damaged."""
    texts, exif = picture.info, _read_exif(picture)
    return Metadata(
        _text_or_empty(texts.get(_PARAMETERS)) or _decode_comment(exif.get_ifd(ExifTags.IFD.Exif).get(_COMMENT)),
        _text_or_empty(texts.get(_ORIGIN)) or _origin_or_empty(exif.get(_HISTORY)),
    )


def owner_info(picture: Image.Image) -> dict[str | tuple[int, int], Any]:
    """The owner's metadata of an image that will be edited, as `save_options` expects it in `Image.info`.

    Thumbnail and orientation are left out, as the pixels change, and how the image was made, except for `parameters` of
    another program, which an origin stores as "before". Damaged EXIF is left out as a whole.

    Args:
        picture: An opened file, or an image whose `info` this function made.
    """
    own_texts = picture.info.get(_TEXTS)
    texts = own_texts if isinstance(own_texts, dict) else {}
    texts = texts | {key: text for key, text in picture.info.items() if _is_text(key, text)}
    comment, xmp = picture.info.get("comment"), picture.info.get("xmp")
    found: dict[str | tuple[int, int], Any] = {
        "icc_profile": picture.info.get("icc_profile"),
        "exif": _owner_exif(picture),
        "xmp": _XMP_ORIENTATION.sub(b"", xmp) if isinstance(xmp, bytes) else None,
        "comment": comment if isinstance(comment, bytes) else None,
        _TEXTS: texts,
        _BEFORE: parameters_before(picture) or _parameters_before(read_metadata(picture)),
    }
    return {key: value for key, value in found.items() if value}


def parameters_before(image: Image.Image) -> str:
    """The `parameters` that another program gave an image whose `info` is as `owner_info` makes it, or ""."""
    return _text_or_empty(image.info.get(_BEFORE))


def tiff_exif(picture: Image.Image) -> bytes:
    """A TIFF's tags as EXIF bytes, for a copy of the image, which has no tags."""
    return _to_bytes(_descriptive(_read_exif(picture)))


def save_options(image: Image.Image, kind: str, metadata: Metadata) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of Pillow's `save` that write an image's metadata.

    Args:
        image: An image, whose `info` is as `owner_info` makes it.
        kind: "PNG", "JPEG", "WEBP" or "TIFF".
        metadata: How the image was made.

    Returns:
        The arguments, and notes on what a JPEG has no room for.
    """
    own: dict[str, bytes] = {key: image.info[key] for key in ("exif", "xmp", "comment") if key in image.info}
    if kind == "PNG":
        return {"pnginfo": _png_chunks(image, metadata), "exif": own.get("exif")}, ()
    if kind == "TIFF":
        return _tiff_options(own, metadata), ()
    kept_blocks = {key: value for key, value in own.items() if kind != "JPEG" or len(value) <= _MAX_JPEG_BYTES[key]}
    omitted = tuple(f"the picture's {key}" for key in own if key not in kept_blocks)
    texts = (metadata, Metadata(metadata.parameters), Metadata())
    exif = {part: _add_to_exif(kept_blocks.get("exif", b""), part) for part in texts}
    kept_metadata = next(part for part, data in exif.items() if kind != "JPEG" or len(data) <= _MAX_JPEG_BYTES["exif"])
    if kept_metadata != metadata:
        omitted += ("how to make it again" if kept_metadata.parameters else "how it was made",)
    notes = tuple(f"left out, as a JPEG has no room for it: {what}" for what in omitted)
    return {"comment": None} | kept_blocks | {"exif": exif[kept_metadata]}, notes


def _tiff_options(own: dict[str, bytes], metadata: Metadata) -> dict[str, Any]:
    """Only the origin is written, which implies the rest: Pillow compresses no TIFF with nested directories."""
    exif = Image.Exif()
    exif.load(_add_to_exif(own.get("exif", b""), Metadata("", metadata.origin)))
    if "xmp" in own:
        exif[_XMP_OF_TIFF] = own["xmp"]
    return {"exif": exif} | ({"compression": None} if set(_IFDS) & set(exif) else {})


def _png_chunks(image: Image.Image, metadata: Metadata) -> PngInfo:
    """A PNG's texts; Pillow writes those beyond Latin-1 as UTF-8."""
    chunks = PngInfo()
    comment = {"Comment": image.info["comment"].decode("utf-8", "replace")} if "comment" in image.info else {}
    for key, text in (comment | image.info.get(_TEXTS, {})).items():
        chunks.add_text(key, text)
    if xmp := image.info.get("xmp"):
        chunks.add_itxt(_XMP, xmp.decode("utf-8", "replace"))
    for key, text in ((_PARAMETERS, metadata.parameters), (_ORIGIN, metadata.origin)):
        if text:
            chunks.add_text(key, text)
    return chunks


def _add_to_exif(own: bytes, metadata: Metadata) -> bytes:
    """The owner's EXIF with how the image was made."""
    if metadata == Metadata():
        return own
    exif = Image.Exif()
    exif.load(own)
    if metadata.origin:
        exif[_HISTORY] = metadata.origin
    if not metadata.parameters:
        return exif.tobytes()
    comment = _UNICODE + metadata.parameters.encode("utf-16-be", "replace")
    exif.get_ifd(ExifTags.IFD.Exif)[_COMMENT] = comment
    entry = f"{'<' if exif.endian == '<' else '>'}HHL"
    plain, undefined = (struct.pack(entry, _COMMENT, kind, len(comment)) for kind in (1, 7))
    return exif.tobytes().replace(plain, undefined, 1)  # Pillow writes another type than the standard's


def _read_exif(picture: Image.Image) -> Image.Exif:
    """An image's EXIF, empty if it is damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubtful metadata is common
        try:
            exif = picture.getexif()
            _ = dict(exif), [exif.get_ifd(ifd) for ifd in _IFDS]  # read now, so that damage shows here
        except _DAMAGED:
            return Image.Exif()
    return exif


def _owner_exif(picture: Image.Image) -> bytes:
    """The owner's EXIF, without storage tags, thumbnail, and how the image was made."""
    own = _descriptive(_read_exif(picture))
    if _origin_or_empty(own.get(_HISTORY)):
        del own[_HISTORY]
    inner = own.get(ExifTags.IFD.Exif, {})
    if _INFOTEXT.search(_decode_comment(inner.get(_COMMENT))):
        del inner[_COMMENT]
    return _to_bytes(own)


def _descriptive(exif: Image.Exif) -> Image.Exif:
    """The tags that describe the image, without those that describe its storage."""
    own = Image.Exif()
    own.endian = exif.endian
    own.update(
        {tag: value for tag, value in exif.items() if tag in _DESCRIPTIVE_TAGS or 0x8000 < tag not in _STORED_TAGS}
    )
    for ifd in _IFDS:
        if tags := {tag: value for tag, value in exif.get_ifd(ifd).items() if tag != ExifTags.IFD.Interop}:
            own[ifd] = tags
    return own


def _to_bytes(exif: Image.Exif) -> bytes:
    try:
        return exif.tobytes() if len(exif) else b""
    except _DAMAGED:
        return b""


def _is_text(key: object, text: object) -> bool:
    """Whether an entry of Pillow's `info` is an owner's text of a PNG."""
    return isinstance(key, str) and isinstance(text, str) and key not in _RESERVED_KEYS and 0 < len(key.encode()) < 80


def _text_or_empty(text: object) -> str:
    return str(text) if isinstance(text, str) else ""


def _origin_or_empty(text: object) -> str:
    """EXIF's ImageHistory if it is an origin, which begins so, else ""."""
    return text if isinstance(text, str) and text.startswith('{"fisedit"') else ""


def _decode_comment(comment: object) -> str:
    """EXIF's UserComment; UTF-16 occurs in either byte order, and every second byte of ASCII is 0."""
    if not isinstance(comment, bytes):
        return _text_or_empty(comment)
    code, words = comment[:_CODE_BYTES], comment[_CODE_BYTES:]
    if code != _UNICODE:
        return words.decode("utf-8", "replace").rstrip("\0 ")
    little = words[1::2].count(0) > words[::2].count(0)
    return words.decode("utf-16-le" if little else "utf-16-be", "replace").rstrip("\0 ")


def _parameters_before(metadata: Metadata) -> str:
    """The `parameters` that another program gave the image, from the origin if there is one, else as they are."""
    if not metadata.origin:
        return metadata.parameters if _INFOTEXT.search(metadata.parameters) else ""
    try:
        return _text_or_empty(json.loads(metadata.origin)["before"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
