"""The form of a file beside its pixels and texts: a JPEG's form, its colours, and parts that are not written again.

Knows Pillow; nothing of editing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from fisedit.metadata import colour_profiles, xmp
from fisedit.metadata.colour_profiles import SRGB, ColourSpace
from fisedit.metadata.jpeg_form import FORM_CHUNK, JpegForm, form_from_bytes, read_form, upright_form

FORM = "form"
"""The key of a `FileForm` in Pillow's `info`."""

_CICP, _CREDENTIALS, _CICP_BYTES, _PNG_SIGNATURE = b"cICP", b"caBX", 4, 8
_COLOURS = ("RGB", "RGBA")
_GREY = ("1", "L", "LA", "La", "I", "F")
_DAMAGED = (AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error, OverflowError)

_HDR, _SIGNED = "its HDR gain map", "its content credentials"
_RAW_PROFILE, _RAW_EXIF = "raw profile type ", "Raw profile type exif"
"""The start of the keywords of such texts, and the keyword that Pillow reads."""

_OPAQUE = "its transparent level (16-bit grey, {}) was read as opaque"
_CURVE = "its curves (TransferFunction of TIFF) are not read: the model saw it as sRGB"
_TRANSFER_FUNCTION, _WHITE_POINT, _PRIMARIES = 301, 318, 319
"""TIFF's tags on colours."""

_CAMERA = "http://ns.google.com/photos/1.0/camera/"
_OTHER_PARTS: Mapping[str, str] = {
    "http://ns.adobe.com/hdr-gain-map/1.0/": _HDR,
    "http://ns.apple.com/HDRGainMap/1.0/": _HDR,
    "http://ns.apple.com/pixeldatainfo/1.0/": _HDR,
    "http://ns.google.com/photos/1.0/container/": "",
    "http://ns.google.com/photos/1.0/container/item/": "",
    "http://ns.google.com/photos/1.0/depthmap/": "its depth map",
    "http://ns.google.com/photos/1.0/image/": "its depth map",
    "http://ns.google.com/photos/1.0/audio/": "its sound",
    "http://ns.google.com/photos/dd/1.0/device/": "its depth map",
    "http://ns.adobe.com/xmp/note/": "the rest of its XMP",
}
"""Namespaces of XMP that describe other parts of a file -> those, "" where another one names them."""

_PROVENANCE = ("http://purl.org/dc/terms/", "provenance")
_FILM, _THUMBNAILS = ("MotionPhoto", "MicroVideo"), ("http://ns.adobe.com/xap/1.0/", "Thumbnails")
_GAIN_MAP_SEGMENT, _CREDENTIALS_SEGMENT = b"urn:iso:std:iso:ts:21496:-1", b"c2pa"
_IPTC, _IPTC_BLOCK = 0x0404, b"8BIM\x04\x04"
_UNCALIBRATED, _ADOBE_RGB = 0xFFFF, 2
_INTEROP_OF_ADOBE_RGB = "R03"


@dataclass(frozen=True)
class FileForm:
    """The form of a file beside its pixels and texts.

    Args:
        jpeg: How a JPEG stores its pixels; None for another file.
        chunks: A PNG's chunks on its colours, in the order of the standard.
        notes: Remarks on what the model saw otherwise than it is.
        lost: Parts that are not written again.
    """

    jpeg: JpegForm | None = None
    chunks: Mapping[bytes, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def all_notes(self) -> tuple[str, ...]:
        """Remarks for the user on a file that is written."""
        lost = f"left out, as it does not fit the edited picture: {', '.join(self.lost)}"
        return (*self.notes, lost) if self.lost else self.notes


def read_file_form(picture: Image.Image) -> FileForm:
    """The form of an opened file that is not decoded yet; of a decoded one, as far as Pillow kept it."""
    known = picture.info.get(FORM)
    if isinstance(known, FileForm):
        return known
    parts = _png_chunks(picture)
    chunks = {_CICP: code} if len(code := parts.get(_CICP, b"")) == _CICP_BYTES else {}
    lost = [*_lost_by_xmp(picture.info.get("xmp")), *_lost_segments(picture)]
    lost += [_SIGNED] if _CREDENTIALS in parts else []
    private = dict(each[:2] for each in getattr(picture, "private_chunks", ()))
    jpeg = form_from_bytes(private[FORM_CHUNK]) if FORM_CHUNK in private else read_form(picture)
    points, notes = _tiff_colours(picture)
    return FileForm(jpeg, chunks | _colour_chunks(picture.info | points), notes, tuple(dict.fromkeys(lost)))


def owner_form(picture: Image.Image) -> tuple[FileForm, bytes | None]:
    """The form of a file that will be edited, turned upright as its picture is, and its ICC profile.

    Args:
        picture: An opened file, or one whose `info` has a form.
    """
    form, profile = read_file_form(picture), picture.info.get("icc_profile")
    colours = _colours(picture, form, has_profile=bool(profile))
    level = picture.info.get("transparency") if picture.mode.startswith("I") else None
    opaque = "" if level is None else _OPAQUE.format(level)
    notes = tuple(dict.fromkeys(filter(None, (*form.notes, colours.note, opaque))))
    jpeg = upright_form(form.jpeg, picture) if form.jpeg else None
    unread = [f"its {key}" for key in raw_profiles(picture.info) if key != _RAW_EXIF]
    lost = tuple(dict.fromkeys((*form.lost, *unread)))
    return replace(form, jpeg=jpeg, notes=notes, lost=lost), colours.profile or profile


def raw_profiles(info: Mapping[Any, Any]) -> list[str]:
    """The keys of a PNG's texts that hold another metadata block in hexadecimal digits, which an edit makes untrue."""
    return [key for key in info if isinstance(key, str) and key.casefold().startswith(_RAW_PROFILE)]


def owner_xmp(packet: bytes, others: frozenset[xmp.Name] | set[xmp.Name]) -> bytes:
    """An XMP packet without what describes other parts of the file; b"" for one that says so and cannot be read.

    Args:
        packet: The packet.
        others: Further properties to leave out.
    """
    if not xmp.is_readable(packet):
        return b"" if any(namespace.encode() in packet for namespace in _OTHER_PARTS) else packet

    def is_unwanted(namespace: str, name: str) -> bool:
        is_film = namespace == _CAMERA and name.startswith(_FILM)
        is_part = is_film or (namespace, name) in (_THUMBNAILS, _PROVENANCE)
        return namespace in _OTHER_PARTS or is_part or (namespace, name) in others

    return xmp.without(packet, is_unwanted)


def _lost_by_xmp(packet: object) -> list[str]:
    if not isinstance(packet, bytes):
        return []
    lost = [name for namespace, name in _OTHER_PARTS.items() if name and namespace.encode() in packet]
    lost += [_HDR] if b"GainMap" in packet else []
    lost += [_SIGNED] if xmp.read_property(packet, _PROVENANCE) else []
    return lost + (["its film"] if any(name.encode() in packet for name in _FILM) else [])


def _lost_segments(picture: Image.Image) -> list[str]:
    """Parts of a JPEG, or tags of a TIFF, that are not written again."""
    if isinstance(picture, TiffImageFile):
        tags = picture.tag_v2
        resources = tags.get(ExifTags.Base.ImageResources, b"")
        has_iptc = ExifTags.Base.IPTCNAA in tags or (isinstance(resources, bytes) and _IPTC_BLOCK in resources)
        return ["its IPTC"] if has_iptc else []
    if not isinstance(picture, JpegImageFile):
        return []
    segments = [content for _, content in picture.applist]
    lost = [_HDR] if any(content.startswith(_GAIN_MAP_SEGMENT) for content in segments) else []
    lost += [_SIGNED] if any(_CREDENTIALS_SEGMENT in each[:64] for each in segments) else []
    lost += ["its IPTC"] if _IPTC in picture.info.get("photoshop", {}) else []
    behind = getattr(picture, "n_frames", 1) - 1
    return lost + ([f"pictures behind the first: {behind}"] if behind else [])


def _png_chunks(picture: Image.Image) -> dict[bytes, bytes]:
    """Chunks before the pixels that Pillow does not keep, of a PNG whose file is open, or has a path."""
    if not isinstance(picture, PngImageFile):
        return {}
    for file in (picture.fp, getattr(picture, "_fp", None)):
        with suppress(*_DAMAGED):  # closed after the pixels were read
            return _scan(file)  # type: ignore[arg-type]
    path = Path(os.fsdecode(picture.filename))
    with suppress(*_DAMAGED):
        if path.is_file():
            with path.open("rb") as file:
                return _scan(file)
    return {}


def _scan(file: IO[bytes]) -> dict[bytes, bytes]:
    """The first bytes of some chunks of an open PNG, which is left as it was."""
    at, found = file.tell(), dict[bytes, bytes]()
    try:
        file.seek(_PNG_SIGNATURE)
        while len(head := file.read(8)) == 8 and head[4:] != b"IDAT":
            after = file.tell() + int.from_bytes(head[:4]) + 4
            if head[4:] in (_CICP, _CREDENTIALS):
                found[head[4:]] = file.read(_CICP_BYTES)
            file.seek(after)
    finally:
        file.seek(at)
    return found


def _tiff_colours(picture: Image.Image) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what a TIFF's tags say of its colours, as Pillow's `info` says it of a PNG, and remarks on the rest.

    An ICC profile is obeyed before them.
    """
    if not isinstance(picture, TiffImageFile) or picture.info.get("icc_profile") or picture.mode not in _COLOURS:
        return {}, ()
    tags = picture.tag_v2
    told = (*tags.get(_WHITE_POINT, SRGB[:2]), *tags.get(_PRIMARIES, SRGB[2:]))
    points = {"chromaticity": told} if {_WHITE_POINT, _PRIMARIES} & set(tags) else {}
    return points, (_CURVE,) if _TRANSFER_FUNCTION in tags else ()


def _colour_chunks(info: Mapping[Any, Any]) -> dict[bytes, bytes]:
    """The chunks that Pillow read, as they were."""
    found, gamma, points, intent = dict[bytes, bytes](), info.get("gamma"), info.get("chromaticity"), info.get("srgb")
    try:
        if points is not None:
            found[b"cHRM"] = struct.pack(">8I", *(round(value * 100_000) for value in points))
        if gamma is not None:
            found[b"gAMA"] = struct.pack(">I", round(gamma * 100_000))
        if intent is not None:
            found[b"sRGB"] = bytes([intent])
    except _DAMAGED:
        return {}
    return found


def _colours(picture: Image.Image, form: FileForm, *, has_profile: bool) -> ColourSpace:
    """The colour space of a picture without an ICC profile; a cICP chunk is obeyed before one, as PNG has it."""
    grey, chunks = picture.mode.startswith("I;16") or picture.mode in _GREY, form.chunks
    if _CICP in chunks:
        return colour_profiles.of_cicp(chunks[_CICP], grey=grey)
    if has_profile or b"sRGB" in chunks:
        return ColourSpace()
    if b"gAMA" in chunks or b"cHRM" in chunks:
        gamma = struct.unpack(">I", chunks[b"gAMA"])[0] / 100_000 if b"gAMA" in chunks else None
        points = tuple(v / 100_000 for v in struct.unpack(">8I", chunks[b"cHRM"])) if b"cHRM" in chunks else None
        return colour_profiles.of_gamma(gamma, points, grey=grey)
    return colour_profiles.adobe_rgb(grey=grey) if _is_adobe_rgb(picture) else ColourSpace()


def _is_adobe_rgb(picture: Image.Image) -> bool:
    """Return whether EXIF marks the colours as cameras mark Adobe RGB."""
    try:
        exif = picture.getexif()
        space = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.ColorSpace)
        marked = space == _UNCALIBRATED and exif.get_ifd(ExifTags.IFD.Interop).get(1) == _INTEROP_OF_ADOBE_RGB
    except _DAMAGED:
        return False
    return space == _ADOBE_RGB or marked
