"""The owner's metadata of pictures that are opened, edited and opened again."""

from __future__ import annotations

from io import BytesIO

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fisedit.storage.canvas import to_editable
from fisedit.storage.image_metadata import owner_info, parameters_before
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


def test_exif_in_a_text_of_a_png_turns_it_once():
    """ImageMagick writes EXIF so."""
    file, texts, exif = BytesIO(), PngInfo(), Image.Exif()
    exif[0x0112] = 6
    data = b"Exif\0\0" + exif.tobytes().removeprefix(b"Exif\0\0")
    texts.add_text("Raw profile type exif", f"\nexif\n{len(data)}\n{data.hex()}\n")
    Image.new("RGB", (40, 20)).save(file, "PNG", pnginfo=texts)
    picture = to_editable(decode(file.getvalue()).image)
    assert picture.size == to_editable(decode(encode(picture, ".png")[0]).image).size == (20, 40)
