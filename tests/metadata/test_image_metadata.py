"""The owner's metadata of pictures that are opened, edited and opened again."""

from __future__ import annotations

from io import BytesIO

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fisedit.metadata.image_metadata import owner_info, parameters_before
from fisedit.storage.canvas import to_editable
from fisedit.storage.images import decode, encode

XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/"%s dc="kept">%s</rdf:Description>'
    b"</rdf:RDF></x:xmpmeta>"
)
ORIENTATIONS = {
    "an attribute": XMP % (b' tiff:Orientation="6"', b""),
    "an element": XMP % (b"", b"<tiff:Orientation>6</tiff:Orientation>"),
}


@pytest.mark.parametrize("with_exif", [True, False])
@pytest.mark.parametrize("xmp", ORIENTATIONS.values(), ids=ORIENTATIONS)
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif"])
def test_a_picture_that_xmp_turns_is_turned_once(suffix, xmp, with_exif):
    file, exif = BytesIO(), Image.Exif()
    if with_exif:
        exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(file, "JPEG", exif=exif, xmp=xmp)
    picture = to_editable(decode(file.getvalue()).image)
    again = decode(encode(picture, suffix)[0]).image
    assert picture.size == to_editable(again).size == (20, 40)
    assert b"kept" in picture.info["xmp"]


def test_metadata_that_was_read_once_is_read_again_as_it_is():
    file, texts = BytesIO(), PngInfo()
    texts.add_text("Author", "A. N. Other")
    texts.add_text("parameters", "a cat\nSteps: 20, Sampler: Euler a")
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=texts)
    picture = to_editable(decode(file.getvalue()).image)
    again = to_editable(picture)
    assert again.info == picture.info == owner_info(picture)
    assert again.info["texts"] == {"Author": "A. N. Other"} and parameters_before(again).startswith("a cat")


RAW_XMP = b"http://ns.adobe.com/xap/1.0/\0" + XMP % (b"", b"")


@pytest.mark.parametrize(
    ("name", "head", "xmp"),
    [("exif", b"Exif\0\0", b""), ("APP1", b"Exif\0\0", b""), ("exif", b"", RAW_XMP), ("EXIF", b"", RAW_XMP[29:])],
)
def test_raw_profiles_of_a_png_are_read_once(name, head, xmp):
    """ImageMagick and older ExifTool write EXIF and XMP so."""
    file, texts, exif = BytesIO(), PngInfo(), Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "mine"
    profiles = {name: head + exif.tobytes().removeprefix(b"Exif\0\0"), "xmp": xmp, "iptc": b"8BIM"}
    for kind, data in profiles.items():
        if data:
            texts.add_text(f"Raw profile type {kind}", f"\n{kind}\n{len(data):8}\n{data.hex()}\n")
    Image.new("RGB", (40, 20)).save(file, "PNG", pnginfo=texts)
    picture = to_editable(decode(file.getvalue()).image)
    written, notes = encode(picture, ".png")
    again = decode(written).image
    assert picture.size == to_editable(again).size == (20, 40) and not any(key.startswith("Raw") for key in again.info)
    assert again.getexif()[0x010E] == "mine" and (b"kept" in again.info.get("xmp", b"")) == bool(xmp)
    assert notes == ("left out, as it does not fit the edited picture: its Raw profile type iptc",)
