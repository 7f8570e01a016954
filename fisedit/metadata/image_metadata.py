"""Reads and writes the metadata of image files: how an image was made, and what its owner wrote into it.

How it was made is two texts: `parameters`, which Stable Diffusion's web UIs read, and `fisedit`, our own JSON. In a PNG
they are chunks of these names; elsewhere EXIF's UserComment, as in those UIs, and ImageHistory. The owner's metadata
are EXIF, XMP, a comment, a PNG's texts, resolution and colours. Knows Pillow and where texts are stored; nothing of
what they mean.
"""

from __future__ import annotations

import json
import re
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from fisedit.metadata import making_texts, xmp
from fisedit.metadata.file_form import FORM, FileForm, owner_form, owner_xmp, raw_profiles, read_file_form
from fisedit.metadata.stealth_texts import read_stealth

_PARAMETERS, _ORIGIN, _XMP = making_texts.PARAMETERS, "fisedit", "XML:com.adobe.xmp"
_TEXTS, _BEFORE, _BEFORE_OF_ORIGIN = "texts", "parameters before", "before"
_OTHER_KEYS = {_ORIGIN, _XMP, _BEFORE, "compression"}
"""Texts that Pillow adds for a TIFF, and ours."""

_EXIF_HEADS, _XMP_HEAD = (b"Exif\0\0", b"II*\0", b"MM\0*"), b"http://ns.adobe.com/xap/1.0/\0"
"""Beginnings of EXIF and of XMP in a segment of a JPEG, which programs write into a PNG's texts as well."""

_XMP_ORIENTATION = re.compile(rb'\s*tiff:Orientation="[0-9]"|<tiff:Orientation>\s*[0-9]\s*</tiff:Orientation>')
_MAX_DPI, _INCH, _JFIF_UNITS = 65_536, 2, (1, 2)
_COMMENT, _HISTORY = ExifTags.Base.UserComment, ExifTags.Base.ImageHistory
_SCHEMES = (b"fooocus", b"fooocus\0", b"a1111", b"a1111\0", "fooocus", "a1111")
"""The names that Fooocus gives to the form of its comment, in a camera's tag."""

_NODES = re.compile(r"(workflow|prompt):(?=\s*\{)", re.IGNORECASE)
"""The start of the EXIF tags that ComfyUI writes into a WebP."""

_DESCRIPTIVE_TAGS = set(range(0x010D, 0x0111)) | {0x011A, 0x011B, 0x0128, 0x0131, 0x0132, 0x013B, 0x013C}
"""TIFF tags that describe the image; the others of this range describe its storage."""
_IFDS = (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo)
_XMP_OF_TIFF = 0x02BC
_STORED_TAGS = {*_IFDS, ExifTags.Base.IPTCNAA, ExifTags.Base.ImageResources, ExifTags.Base.InterColorProfile}

_EXIF_XMP, _TIFF_XMP = "http://ns.adobe.com/exif/1.0/", "http://ns.adobe.com/tiff/1.0/"
_XMP_COMMENT, _XMP_TOOL = (_EXIF_XMP, "UserComment"), ("http://ns.adobe.com/xap/1.0/", "CreatorTool")
_DRAW_THINGS = "Draw Things"
_XMP_DESCRIPTION = ("http://purl.org/dc/elements/1.1/", "description")
_IPTC = "http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
_OF_MAKING = {
    *((_IPTC, name) for name in ("DigitalSourceType", "AISystemUsed", "AISystemVersionUsed")),
    *((_IPTC, name) for name in ("AIPromptInformation", "AIPromptWriterName")),
}
"""IPTC's properties of XMP that say that and how a model made a picture."""

_UNICODE, _CODE_BYTES = b"UNICODE\0", 8
_MAX_JPEG_BYTES = {"exif": 65_533, "xmp": 65_504, "comment": 65_533}
"""Greatest size of each in a JPEG."""

_DAMAGED = (ArithmeticError, AttributeError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error)
"""The exceptions that Pillow raises for forged metadata."""


@dataclass(frozen=True)
class Metadata:
    """The texts that say how an image was made.

    Args:
        parameters: Prompt and settings as AUTOMATIC1111's web UI writes them, a JSON object of what another program
            wrote, or "".
        origin: The JSON of `metadata.provenance`, or "".
    """

    parameters: str = ""
    origin: str = ""


def read_metadata(picture: Image.Image) -> Metadata:
    """The unchecked metadata of an opened file; "" for texts that are missing or damaged."""
    exif = _read_exif(picture)
    origin = _text_or_empty(picture.info.get(_ORIGIN)) or _origin_or_empty(exif.get(_HISTORY))
    if origin:
        told = _text_or_empty(picture.info.get(_PARAMETERS))
        return Metadata(told or _decode_comment(exif.get_ifd(ExifTags.IFD.Exif).get(_COMMENT)), origin)
    return Metadata(making_texts.join_texts(_making_texts(picture, exif)))


def _making_texts(picture: Image.Image, exif: Image.Exif) -> dict[str, str]:
    """Every text that says how a picture was made, by its keyword."""
    comment = picture.info.get("comment")
    told = making_texts.making_texts(_texts(picture))
    elsewhere = [
        _decode_comment(exif.get_ifd(ExifTags.IFD.Exif).get(_COMMENT)),
        comment.decode("utf-8", "replace") if isinstance(comment, bytes) else "",
        xmp.read_property(_xmp_of(picture), _XMP_COMMENT),
    ]
    for value in (_tag_text(tag, value) for tag, value in exif.items()):
        if match := _NODES.match(value):
            told.setdefault(match[1].lower(), value[match.end() :].rstrip("\0"))
        else:
            elsewhere.append(value)
    found = [text for text in elsewhere if making_texts.is_making(text)]
    if not told and not found and (hidden := read_stealth(picture)):
        found = [hidden]
    return {_PARAMETERS: found[0]} | told if found and _PARAMETERS not in told else told


def owner_info(picture: Image.Image) -> dict[str | tuple[int, int], Any]:
    """The owner's metadata of an image that will be edited, as `save_options` expects it in `Image.info`.

    Thumbnail and orientation are left out, as the pixels change, and how the image was made, which an origin stores as
    "before". So is what describes parts of the file that are not written again. Damaged EXIF is left out as a whole.

    Args:
        picture: An opened file, or an image whose `info` this function made.
    """
    form, profile = owner_form(picture)
    exif = _read_exif(picture)
    own_texts, comment = picture.info.get(_TEXTS), picture.info.get("comment")
    texts = _texts(picture)
    making = making_texts.making_texts(texts)
    is_own = isinstance(comment, bytes) and not making_texts.is_making(comment.decode("utf-8", "replace"))
    found: dict[str | tuple[int, int], Any] = {
        "icc_profile": profile,
        "exif": _owner_exif(exif),
        "xmp": _owner_xmp(_xmp_of(picture)),
        "comment": comment if is_own else None,
        "dpi": _resolution(picture, form, exif),
        _TEXTS: (own_texts if isinstance(own_texts, dict) else {})
        | {key: text for key, text in texts.items() if key not in making},
        FORM: form if form != FileForm() else None,
        _BEFORE: parameters_before(picture) or _parameters_before(read_metadata(picture)),
    }
    return {key: value for key, value in found.items() if value}


def parameters_before(image: Image.Image) -> str:
    """The `parameters` that another program gave an image whose `info` is as `owner_info` makes it, or ""."""
    return _text_or_empty(image.info.get(_BEFORE))


def tiff_exif(picture: Image.Image) -> bytes:
    """A TIFF's tags as EXIF bytes, for a copy of the image, which has no tags."""
    return _to_bytes(_descriptive(_read_exif(picture)))


def file_notes(image: Image.Image) -> tuple[str, ...]:
    """Remarks on what an edit of a file does not keep of it, from an `info` as `owner_info` makes it."""
    form = image.info.get(FORM)
    return form.all_notes() if isinstance(form, FileForm) else ()


def file_info(picture: Image.Image) -> dict[str | tuple[int, int], Any]:
    """Return what Pillow's `info` lacks of a file that is opened and not decoded yet, for the `info` of a copy."""
    return {FORM: form} if (form := read_file_form(picture)) != FileForm() else {}


def with_raw_profiles(info: Mapping[str | tuple[int, int], Any]) -> dict[str | tuple[int, int], Any]:
    """Pillow's `info` of a PNG with the EXIF and XMP of its raw profiles in the places where Pillow has them.

    Those are hexadecimal texts of ImageMagick and older ExifTool, of which Pillow reads one name.

    Args:
        info: The `info` as Pillow reads it.
    """
    found = dict(info)
    for key in raw_profiles(info):
        content = _raw_content(info[key])
        if content.startswith(_EXIF_HEADS):
            found.setdefault("exif", content)
        elif content.startswith(_XMP_HEAD) or b"<x:xmpmeta" in content:
            found.setdefault("xmp", content.removeprefix(_XMP_HEAD))
        else:
            continue
        del found[key]
    return found


def _raw_content(text: object) -> bytes:
    """The bytes of a raw profile: behind an empty line, its name and its length; b"" if it is damaged."""
    try:
        return bytes.fromhex("".join(str(text).split("\n")[3:]))
    except ValueError:
        return b""


def save_options(image: Image.Image, kind: str, metadata: Metadata) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of Pillow's `save` that write an image's metadata.

    Args:
        image: An image, whose `info` is as `owner_info` makes it.
        kind: "PNG", "JPEG", "WEBP" or "TIFF".
        metadata: How the image was made; of none, XMP that a model made it is left out too.

    Returns:
        The arguments, and notes on what is not written.
    """
    own: dict[str, bytes] = {key: image.info[key] for key in ("exif", "xmp", "comment") if key in image.info}
    if metadata == Metadata() and "xmp" in own:
        own["xmp"] = owner_xmp(own["xmp"], _OF_MAKING)
    options, notes = _options_by_kind(image, kind, own, metadata)
    return options, file_notes(image) + notes


def _options_by_kind(
    image: Image.Image, kind: str, own: dict[str, bytes], metadata: Metadata
) -> tuple[dict[str, Any], tuple[str, ...]]:
    dpi = {"dpi": image.info["dpi"]} if "dpi" in image.info else {}
    if kind == "PNG":
        return {"pnginfo": _png_chunks(image, own, metadata), "exif": own.get("exif")} | dpi, ()
    if kind == "TIFF":
        return _tiff_options(own, metadata) | dpi, ()
    if kind == "WEBP":
        exif = _add_to_exif(_add_resolution(own.get("exif", b""), **dpi), metadata)
        return {"exif": exif, "xmp": own.get("xmp", b"")}, ()
    options, omitted = _jpeg_options(own, metadata)
    return options | dpi, tuple(f"left out, as a JPEG has no room for it: {what}" for what in omitted)


def _jpeg_options(own: dict[str, bytes], metadata: Metadata) -> tuple[dict[str, Any], list[str]]:
    """The arguments for a JPEG, and what it has no room for."""
    kept = {key: value for key, value in own.items() if len(value) <= _MAX_JPEG_BYTES[key]}
    omitted = [f"the picture's {key}" for key in own if key not in kept]
    texts = {
        metadata: [],
        Metadata(metadata.parameters, _without_before(metadata.origin)): ["what another program said of its making"],
        Metadata(metadata.parameters): ["how to make it again"],
        Metadata(): ["how it was made"],
    }
    texts[metadata] = []  # the same as another one where it says less
    exif = {part: _add_to_exif(kept.get("exif", b""), part) for part in texts}
    part = next(part for part, data in exif.items() if len(data) <= _MAX_JPEG_BYTES["exif"])
    return {"comment": None} | kept | {"exif": exif[part]}, omitted + texts[part]


def _without_before(origin: str) -> str:
    """An origin without what it stores of another program."""
    try:
        data = json.loads(origin)
        return json.dumps({key: value for key, value in data.items() if key != _BEFORE_OF_ORIGIN})
    except (ValueError, AttributeError, RecursionError):
        return origin


def _add_resolution(exif_bytes: bytes, dpi: tuple[float, float] | None = None) -> bytes:
    """EXIF that tells a resolution, where it told none."""
    exif = Image.Exif()
    exif.load(exif_bytes)
    if dpi is None or ExifTags.Base.XResolution in exif:
        return exif_bytes
    exif[ExifTags.Base.XResolution], exif[ExifTags.Base.YResolution] = dpi
    exif[ExifTags.Base.ResolutionUnit] = _INCH
    return exif.tobytes()


def _tiff_options(own: dict[str, bytes], metadata: Metadata) -> dict[str, Any]:
    """Only the origin is written, which implies the rest: Pillow compresses no TIFF with nested directories."""
    exif = Image.Exif()
    exif.load(_add_to_exif(own.get("exif", b""), Metadata("", metadata.origin)))
    if "xmp" in own:
        exif[_XMP_OF_TIFF] = own["xmp"]
    return {"exif": exif} | ({"compression": None} if set(_IFDS) & set(exif) else {})


def _png_chunks(image: Image.Image, own: dict[str, bytes], metadata: Metadata) -> PngInfo:
    """A PNG's texts, which Pillow writes as UTF-8 beyond Latin-1, and what its colours are."""
    chunks, form = PngInfo(), image.info.get(FORM)
    for kind, content in form.chunks.items() if isinstance(form, FileForm) else ():
        chunks.add(kind, content)
    comment = {"Comment": own["comment"].decode("utf-8", "replace")} if "comment" in own else {}
    for key, text in (comment | image.info.get(_TEXTS, {})).items():
        chunks.add_text(key, text)
    if "xmp" in own:
        chunks.add_itxt(_XMP, own["xmp"].decode("utf-8", "replace"))
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


def _owner_exif(exif: Image.Exif) -> bytes:
    """The owner's EXIF, without storage tags, thumbnail, and how the image was made."""
    own = _descriptive(exif)
    inner = own.get(ExifTags.IFD.Exif, {})
    told = [tag for tag, value in own.items() if _tells_making(_tag_text(tag, value))]
    if making_texts.is_making(_decode_comment(inner.get(_COMMENT))):
        del inner[_COMMENT]
    if inner.get(ExifTags.Base.MakerNote, b"") in _SCHEMES:
        del inner[ExifTags.Base.MakerNote]
    for tag in told:
        own.pop(tag, None)
    return _to_bytes(own)


def _tag_text(tag: int, value: object) -> str:
    """The text of a tag of EXIF, "" for another value; Windows writes its own in bytes."""
    if isinstance(value, bytes) and ExifTags.Base.XPTitle <= tag <= ExifTags.Base.XPSubject:
        return value.decode("utf-16-le", "replace").rstrip("\0")
    return _text_or_empty(value)


def _tells_making(value: str) -> bool:
    """Return whether a tag of EXIF says how the image was made, or by which program of models."""
    return bool(
        value.startswith(making_texts.PROGRAMS)
        or _origin_or_empty(value)
        or _NODES.match(value)
        or making_texts.is_making(value)
    )


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


def _resolution(picture: Image.Image, form: FileForm, exif: Image.Exif) -> tuple[float, float] | None:
    """Dots per inch across and down, as the file told them; None for what is none, or what Pillow makes up."""
    try:
        across, down = map(float, picture.info.get("dpi", ()))
    except _DAMAGED:
        return None
    is_told = form.jpeg is None or picture.info.get("jfif_unit") in _JFIF_UNITS or ExifTags.Base.XResolution in exif
    return (across, down) if is_told and 1 < across < _MAX_DPI and 1 < down < _MAX_DPI else None


def _owner_xmp(packet: bytes) -> bytes:
    """The owner's XMP, without orientation, how the image was made, and what describes other parts of the file."""
    unwanted = {(_TIFF_XMP, "Orientation")}
    if making_texts.is_making(xmp.read_property(packet, _XMP_COMMENT)):
        is_program = xmp.read_property(packet, _XMP_TOOL) == _DRAW_THINGS
        unwanted |= {_XMP_COMMENT, *((_XMP_TOOL, _XMP_DESCRIPTION) if is_program else ())}
    return _XMP_ORIENTATION.sub(b"", owner_xmp(packet, unwanted))


def _xmp_of(picture: Image.Image) -> bytes:
    packet = picture.info.get("xmp")
    return packet if isinstance(packet, bytes) else b""


def _to_bytes(exif: Image.Exif) -> bytes:
    try:
        return exif.tobytes() if len(exif) else b""
    except _DAMAGED:
        return b""


def _texts(picture: Image.Image) -> dict[str, str]:
    """A PNG's texts but for ours, from Pillow's `info`."""
    found = {key: str(text) for key, text in picture.info.items() if isinstance(key, str) and isinstance(text, str)}
    others = _OTHER_KEYS | set(raw_profiles(found))
    return {key: text for key, text in found.items() if key not in others and 0 < len(key.encode()) < 80}


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
        return metadata.parameters
    try:
        return _text_or_empty(json.loads(metadata.origin)[_BEFORE_OF_ORIGIN])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
