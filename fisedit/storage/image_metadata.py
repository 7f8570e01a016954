"""What a picture's file says besides its pixels: how it was made, and what its owner wrote into it.

How it was made is two texts: `parameters`, which Stable Diffusion's web UIs read, and `fisedit`, a JSON of our own. In
a PNG they are chunks of these names; elsewhere EXIF's UserComment, as those UIs have it, and ImageHistory. The owner's
words are EXIF, XMP, a comment and a PNG's texts. Knows Pillow and where texts stand; nothing of what they mean.
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
_NO_TEXT = {_PARAMETERS, _ORIGIN, _XMP, "compression"}  # the last is a word of Pillow's about a TIFF
_INFOTEXT = re.compile(r"^Steps: \d+, ", re.MULTILINE)

_COMMENT, _HISTORY = ExifTags.Base.UserComment, ExifTags.Base.ImageHistory
_DESCRIBES = set(range(0x010D, 0x0111)) | {0x011A, 0x011B, 0x0128, 0x0131, 0x0132, 0x013B, 0x013C}
"""Tags of a TIFF that tell of the picture, among those that tell how it is stored."""
_IFDS = (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo)
_XMP_OF_TIFF = 0x02BC
_STORED = {*_IFDS, ExifTags.Base.IPTCNAA, ExifTags.Base.ImageResources, ExifTags.Base.InterColorProfile}

_UNICODE, _CODE = b"UNICODE\0", 8
_MOST = {"exif": 65_533, "xmp": 65_504, "comment": 65_533}
"""Bytes of each that a JPEG takes."""

_DAMAGED = (ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error)
"""What Pillow raises over metadata that somebody made up."""


@dataclass(frozen=True)
class Metadata:
    """How a picture was made.

    Args:
        parameters: prompt and settings as AUTOMATIC1111's web UI writes them.
        origin: as `storage.provenance` writes it; both "" where nothing is said.
    """

    parameters: str = ""
    origin: str = ""


def read(picture: Image.Image) -> Metadata:
    """What a picture's file says of its making, unchecked; "" for what it does not say, or what cannot be read."""
    texts, exif = picture.info, _exif(picture)
    return Metadata(
        _said(texts.get(_PARAMETERS)) or _uncoded(exif.get_ifd(ExifTags.IFD.Exif).get(_COMMENT)),
        _said(texts.get(_ORIGIN)) or _ours(exif.get(_HISTORY)),
    )


def kept(picture: Image.Image) -> dict[str | tuple[int, int], Any]:
    """The owner's words, for a picture that becomes another: what `options` writes of `Image.info`.

    Thumbnail and orientation are left out, for the picture changes; so is what tells how it was made, but for the
    `parameters` that it came with, which an origin tells as what was before. Damaged EXIF is left out as a whole.
    """
    made, texts = read(picture), {key: text for key, text in picture.info.items() if _is_text(key, text)}
    comment, xmp = picture.info.get("comment"), picture.info.get("xmp")
    found: dict[str | tuple[int, int], Any] = {
        "icc_profile": picture.info.get("icc_profile"),
        "exif": _owners(picture),
        "xmp": xmp if isinstance(xmp, bytes) else None,
        "comment": comment if isinstance(comment, bytes) else None,
        "texts": texts,
        "before": _before(made.origin) if made.origin else made.parameters if _INFOTEXT.search(made.parameters) else "",
    }
    return {key: value for key, value in found.items() if value}


def tags(picture: Image.Image) -> bytes:
    """A TIFF's tags as EXIF, for a copy of it, which has none."""
    return _bytes(_described(_exif(picture)))


def options(image: Image.Image, kind: str, made: Metadata) -> tuple[dict[str, Any], tuple[str, ...]]:
    """How Pillow writes an image's metadata, and what is lost for want of room.

    Args:
        image: whose `info` is as `kept` makes it. kind: "PNG", "JPEG", "WEBP" or "TIFF".
    """
    own: dict[str, bytes] = {key: image.info[key] for key in ("exif", "xmp", "comment") if key in image.info}
    if kind == "PNG":
        return {"pnginfo": _chunks(image, made), "exif": own.get("exif")}, ()
    if kind == "TIFF":
        return _tiff(own, made), ()
    small = {key: value for key, value in own.items() if kind != "JPEG" or len(value) <= _MOST[key]}
    lost = tuple(f"the picture's {key}" for key in own if key not in small)
    exif = {told: _with(small.get("exif", b""), told) for told in (made, Metadata(made.parameters), Metadata())}
    fitting = next(told for told, data in exif.items() if kind != "JPEG" or len(data) <= _MOST["exif"])
    if fitting != made:
        lost += ("how to make it again" if fitting.parameters else "how it was made",)
    notes = tuple(f"left out, as a JPEG has no room for it: {what}" for what in lost)
    return {"comment": None} | small | {"exif": exif[fitting]}, notes


def _tiff(own: dict[str, bytes], made: Metadata) -> dict[str, Any]:
    """Of how it was made the origin alone, from which the rest follows: Pillow packs no TIFF with inner directories."""
    exif = Image.Exif()
    exif.load(_with(own.get("exif", b""), Metadata("", made.origin)))
    if "xmp" in own:
        exif[_XMP_OF_TIFF] = own["xmp"]
    return {"exif": exif} | ({"compression": None} if set(_IFDS) & set(exif) else {})


def _chunks(image: Image.Image, made: Metadata) -> PngInfo:
    """A PNG's texts; Pillow writes those beyond Latin-1 as UTF-8."""
    chunks = PngInfo()
    comment = {"Comment": image.info["comment"].decode("utf-8", "replace")} if "comment" in image.info else {}
    for key, text in (comment | image.info.get("texts", {})).items():
        chunks.add_text(key, text)
    if xmp := image.info.get("xmp"):
        chunks.add_itxt(_XMP, xmp.decode("utf-8", "replace"))
    for key, text in ((_PARAMETERS, made.parameters), (_ORIGIN, made.origin)):
        if text:
            chunks.add_text(key, text)
    return chunks


def _with(own: bytes, made: Metadata) -> bytes:
    """The owner's EXIF with how the picture was made."""
    if made == Metadata():
        return own
    exif = Image.Exif()
    exif.load(own)
    if made.origin:
        exif[_HISTORY] = made.origin
    if not made.parameters:
        return exif.tobytes()
    comment = _UNICODE + made.parameters.encode("utf-16-be", "replace")
    exif.get_ifd(ExifTags.IFD.Exif)[_COMMENT] = comment
    entry = f"{'<' if exif.endian == '<' else '>'}HHL"
    plain, undefined = (struct.pack(entry, _COMMENT, kind, len(comment)) for kind in (1, 7))
    return exif.tobytes().replace(plain, undefined, 1)  # Pillow calls it bytes, and UIs insist on the standard's type


def _exif(picture: Image.Image) -> Image.Exif:
    """A picture's EXIF, empty where it is damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubtful metadata is no news
        try:
            exif = picture.getexif()
            _ = dict(exif), [exif.get_ifd(ifd) for ifd in _IFDS]  # read now, so that damage shows here
        except _DAMAGED:
            return Image.Exif()
    return exif


def _owners(picture: Image.Image) -> bytes:
    """The owner's EXIF, without what tells how the picture is stored, how it was made, and what it looked like."""
    own = _described(_exif(picture))
    if _ours(own.get(_HISTORY)):
        del own[_HISTORY]
    inner = own.get(ExifTags.IFD.Exif, {})
    if _INFOTEXT.search(_uncoded(inner.get(_COMMENT))):
        del inner[_COMMENT]
    return _bytes(own)


def _described(exif: Image.Exif) -> Image.Exif:
    """What EXIF tells of a picture, and not of how it is stored."""
    own = Image.Exif()
    own.endian = exif.endian
    own.update({tag: value for tag, value in exif.items() if tag in _DESCRIBES or 0x8000 < tag not in _STORED})
    for ifd in _IFDS:
        if tags := {tag: value for tag, value in exif.get_ifd(ifd).items() if tag != ExifTags.IFD.Interop}:
            own[ifd] = tags
    return own


def _bytes(exif: Image.Exif) -> bytes:
    try:
        return exif.tobytes() if len(exif) else b""
    except _DAMAGED:
        return b""


def _is_text(key: object, text: object) -> bool:
    """Whether an entry of Pillow's `info` is a text that the owner wrote into a PNG."""
    return isinstance(key, str) and isinstance(text, str) and key not in _NO_TEXT and 0 < len(key.encode()) < 80


def _said(text: object) -> str:
    return str(text) if isinstance(text, str) else ""


def _ours(text: object) -> str:
    """A text of EXIF's ImageHistory if it is an origin, which begins so, else ""."""
    return text if isinstance(text, str) and text.startswith('{"fisedit"') else ""


def _uncoded(comment: object) -> str:
    """EXIF's UserComment; UTF-16 comes in either order, and every second byte of plain words is 0."""
    if not isinstance(comment, bytes):
        return _said(comment)
    code, words = comment[:_CODE], comment[_CODE:]
    if code != _UNICODE:
        return words.decode("utf-8", "replace").rstrip("\0 ")
    little = words[1::2].count(0) > words[::2].count(0)
    return words.decode("utf-16-le" if little else "utf-16-be", "replace").rstrip("\0 ")


def _before(origin: str) -> str:
    """What an origin tells of the time before."""
    try:
        return _said(json.loads(origin)["before"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
