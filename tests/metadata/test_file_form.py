"""What a file is beside its pixels and texts, after a picture was opened and written again."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from fisedit.storage.canvas import to_canvas, to_editable
from fisedit.storage.images import decode, encode

XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:dc="http://purl.org/dc/elements/1.1/" dc:rights="mine" {}</rdf:Description></rdf:RDF>'
    "</x:xmpmeta>"
)
CONTAINER = (
    'xmlns:C="http://ns.google.com/photos/1.0/container/" xmlns:I="http://ns.google.com/photos/1.0/container/item/">'
    '<C:Directory><rdf:Seq><rdf:li rdf:parseType="Resource"><C:Item I:Semantic="GainMap" I:Length="9"/></rdf:li>'
    "</rdf:Seq></C:Directory>"
)
CLAIMS = {
    "gain map": (
        'xmlns:hdrgm="http://ns.adobe.com/hdr-gain-map/1.0/" hdrgm:Version="1.0" ' + CONTAINER,
        "HDR gain map",
    ),
    "container": (CONTAINER, "HDR gain map"),
    "gain map of Apple": (
        'xmlns:a="http://ns.apple.com/HDRGainMap/1.0/"><a:HDRGainMapVersion>1</a:HDRGainMapVersion>',
        "HDR",
    ),
    "film": ('xmlns:G="http://ns.google.com/photos/1.0/camera/" G:MotionPhoto="1" G:SpecialTypeID="5">', "its film"),
    "depth": ('xmlns:D="http://ns.google.com/photos/1.0/depthmap/" D:Near="1">', "its depth map"),
    "credentials": ('xmlns:t="http://purl.org/dc/terms/" t:provenance="https://c2pa">', "its content credentials"),
    "rest": ('xmlns:n="http://ns.adobe.com/xmp/note/" n:HasExtendedXMP="AB">', "the rest of its XMP"),
}


def file_of(image, kind="PNG", **options):
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def scene(mode="RGB"):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).convert(mode)


def with_chunk(data, kind, content):
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return data[:33] + chunk + data[33:]


def with_segment(data, marker, content):
    return data[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content + data[2:]


OPENINGS = {"Pillow": lambda data: Image.open(BytesIO(data)), "bytes": lambda data: decode(data).image}


class TestClaims:
    @pytest.mark.parametrize("opened", OPENINGS.values(), ids=OPENINGS)
    @pytest.mark.parametrize(("claim", "lost"), CLAIMS.values(), ids=CLAIMS)
    def test_they_go_with_what_they_describe_and_that_is_told(self, claim, lost, opened):
        data = file_of(scene(), "JPEG", xmp=XMP.format(claim).encode()) + file_of(scene(), "JPEG")
        written, notes = encode(to_editable(opened(data)), ".jpg")
        xmp = Image.open(BytesIO(written)).info["xmp"]
        assert b'dc:rights="mine"' in xmp and len(notes) == 1 and lost in notes[0]
        assert not any(
            word in xmp for word in (b"Item", b"GainMap", b"hdrgm", b"Motion", b"Near", b"Extended", b"apple")
        )
        assert (b"SpecialTypeID" in xmp) == ("SpecialTypeID" in claim)

    @pytest.mark.parametrize(
        ("data", "lost"),
        [
            (with_segment(file_of(scene(), "JPEG"), 0xE2, b"urn:iso:std:iso:ts:21496:-1\0\0\0"), "HDR gain map"),
            (with_segment(file_of(scene(), "JPEG"), 0xEB, b"JP\0\1\0\0\0\1\0\0jumbc2pa"), "content credentials"),
            (with_segment(file_of(scene(), "JPEG"), 0xED, b"Photoshop 3.0\0008BIM\4\4\0\0\0\0\0\2ab"), "IPTC"),
            (file_of(scene(), "TIFF", tiffinfo={33723: b"\x1c\x02t\0\1a"}), "IPTC"),
            (file_of(scene(), "TIFF", tiffinfo={34377: b"8BIM\4\4\0\0\0\0\0\2ab"}), "IPTC"),
            (with_chunk(file_of(scene()), b"caBX", b"jumbc2pa"), "content credentials"),
            (file_of(scene(), "MPO", save_all=True, append_images=[scene()]), "pictures behind the first: 1"),
        ],
    )
    def test_parts_that_are_not_written_again_are_told(self, data, lost):
        for opened in OPENINGS.values():
            picture = to_editable(opened(data))
            assert lost in encode(picture, ".png")[1][0] and lost in encode(to_editable(picture), ".jpg")[1][0]

    def test_a_packet_that_cannot_be_read_is_kept_unless_it_claims_something(self):
        for claim, is_kept in (("", True), ("http://ns.adobe.com/hdr-gain-map/1.0/", False)):
            picture = to_editable(decode(file_of(scene(), "JPEG", xmp=f"<x:a {claim}".encode())).image)
            assert ("xmp" in picture.info) == is_kept

    def test_a_plain_file_says_nothing(self):
        for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
            assert encode(to_editable(decode(file_of(scene(), kind)).image), ".png")[1] == ()


class TestResolution:
    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "BMP"])
    @pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif", ".webp"])
    def test_it_stays(self, kind, suffix):
        written, _ = encode(to_editable(decode(file_of(scene(), kind, dpi=(300, 150))).image), suffix)
        picture = Image.open(BytesIO(written))
        found = picture.info.get("dpi") or [picture.getexif()[tag] for tag in (0x011A, 0x011B)]
        assert np.allclose([float(value) for value in found], (300, 150), atol=0.1)

    def test_what_pillow_makes_up_is_no_resolution(self):
        exif = Image.Exif()
        exif[ExifTags.Base.Make] = "Leica"
        jpeg = file_of(scene(), "JPEG", exif=exif)
        for data in (jpeg, jpeg[:2] + jpeg[20:], file_of(scene(), "TIFF", exif=exif)):  # without JFIF's header
            assert "dpi" not in to_editable(decode(data).image).info

    def test_nonsense_is_left_out(self):
        picture = scene()
        for dpi in ((0, 0), "ab", (float("nan"), 1), (1e9, 1)):
            picture.info["dpi"] = dpi
            assert "dpi" not in to_editable(picture).info


CICP, GAMMA = (b"cICP", bytes([12, 13, 0, 1])), (b"gAMA", struct.pack(">I", 100_000))
SRGB_CHRM = (b"cHRM", struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000))
WIDE_CHRM = (b"cHRM", struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000))


def seen(picture):
    """What the model sees of a picture's first pixel."""
    return to_canvas(picture, picture.size).getpixel((0, 0))


class TestColours:
    @pytest.mark.parametrize("opened", OPENINGS.values(), ids=OPENINGS)
    @pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif"])
    @pytest.mark.parametrize("chunk", [CICP, GAMMA, WIDE_CHRM], ids=["cICP", "gAMA", "cHRM"])
    def test_they_become_a_profile_and_are_seen_converted(self, chunk, suffix, opened):
        levels = Image.new("RGB", (64, 64), (200, 100, 50))
        picture = to_editable(opened(with_chunk(file_of(levels), *chunk)))
        expected = (229, 168, 123) if chunk == GAMMA else (215, 93, 31)  # by the standards' own formulas
        assert np.abs(np.subtract(seen(picture), expected)).max() <= 1
        written, notes = encode(picture, suffix)
        again = to_editable(decode(written).image)
        assert notes == () and np.abs(np.subtract(seen(again), expected)).max() <= (6 if suffix == ".jpg" else 1)
        assert suffix != ".png" or chunk[0] in written
        assert np.abs(np.subtract(again.getpixel((0, 0)), (200, 100, 50))).max() <= (2 if suffix == ".jpg" else 0)

    @pytest.mark.parametrize("suffix", [".png", ".tif"])
    def test_those_of_tiff_are_obeyed_and_its_curves_told(self, suffix):
        tags = ImageFileDirectory_v2()
        tags[318], tags[319] = (0.3127, 0.329), (0.68, 0.32, 0.265, 0.69, 0.15, 0.06)
        data = file_of(Image.new("RGB", (64, 64), (200, 100, 50)), "TIFF", tiffinfo=tags)
        picture = to_editable(decode(data).image)
        written, notes = encode(picture, suffix)
        again = to_editable(decode(written).image)
        assert notes == () and all(
            np.abs(np.subtract(seen(each), (215, 93, 31))).max() <= 1 for each in (picture, again)
        )
        tags[301] = tuple(range(256)) * 3
        picture = to_editable(decode(file_of(scene(), "TIFF", tiffinfo=tags)).image)
        assert "TransferFunction" in encode(picture, suffix)[1][0]

    @pytest.mark.parametrize("mode", ["L", "LA", "I;16"])
    def test_grey_ones(self, mode):
        level = 55 * 257 if mode == "I;16" else 55
        grey = Image.new("I;16" if mode == "I;16" else "L", (64, 64), level).convert(mode)
        picture = to_editable(decode(with_chunk(file_of(grey), *GAMMA)).image)
        assert picture.mode == mode and seen(picture) == (128, 128, 128)
        assert seen(to_editable(decode(encode(picture, ".png")[0]).image)) == (128, 128, 128)

    @pytest.mark.parametrize(
        "chunks",
        [[(b"gAMA", struct.pack(">I", 45455))], [(b"gAMA", struct.pack(">I", 45455)), SRGB_CHRM], [(b"sRGB", b"\0")]],
    )
    def test_what_programs_write_for_srgb_is_no_profile(self, chunks):
        data = file_of(Image.new("RGB", (64, 64), (200, 100, 50)))
        for chunk in chunks:
            data = with_chunk(data, *chunk)
        picture = to_editable(decode(data).image)
        assert "icc_profile" not in picture.info and seen(picture) == (200, 100, 50)
        assert all(kind in encode(picture, ".png")[0] for kind, _ in chunks)

    @pytest.mark.parametrize(
        ("chunk", "note"),
        [
            ((b"cICP", bytes([9, 16, 0, 1])), "PQ"),
            ((b"cICP", bytes([9, 18, 0, 1])), "HLG"),
            ((b"cICP", bytes([2, 2, 0, 1])), "cICP 2/2/0/1"),
            ((b"cICP", bytes([1, 13, 1, 1])), "cICP 1/13/1/1"),
            ((b"gAMA", bytes(4)), "gAMA 0"),
            ((b"cHRM", bytes(32)), "cHRM"),
        ],
    )
    def test_what_the_model_sees_otherwise_is_told(self, chunk, note):
        picture = to_editable(decode(with_chunk(file_of(scene()), *chunk)).image)
        written, notes = encode(picture, ".png")
        assert note in notes[0] and len(notes) == 1
        assert np.array_equal(np.asarray(decode(written).image), np.asarray(picture))

    def test_a_picture_whose_pixels_were_read_before(self, tmp_path):
        data = with_chunk(file_of(Image.new("RGB", (64, 64), (200, 100, 50))), *CICP)
        (tmp_path / "a.png").write_bytes(data)
        with Image.open(tmp_path / "a.png") as closed:
            closed.load()
        opened = Image.open(BytesIO(data))
        opened.load()
        assert seen(to_editable(closed)) == seen(to_editable(opened)) == (215, 93, 31)

    def test_cicp_is_obeyed_before_a_profile_and_a_profile_before_gamma(self):
        wide = to_editable(decode(with_chunk(file_of(scene()), *CICP)).image).info["icc_profile"]
        srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
        data = file_of(scene(), icc_profile=srgb)
        assert to_editable(decode(with_chunk(data, *CICP)).image).info["icc_profile"] == wide
        assert to_editable(decode(with_chunk(data, *GAMMA)).image).info["icc_profile"] == srgb

    def test_cameras_mark_of_adobe_rgb(self):
        exif = Image.Exif()
        inner = exif.get_ifd(ExifTags.IFD.Exif)
        inner[ExifTags.Base.ColorSpace], inner[ExifTags.IFD.Interop] = 0xFFFF, {1: "R03"}
        grey = Image.new("RGB", (64, 64), (100, 150, 100))
        picture = to_editable(decode(file_of(grey, "JPEG", exif=exif, quality=100)).image)
        assert seen(picture)[0] < 70 and "icc_profile" in picture.info


def levels(width=96, height=64):
    """Fine coloured print, which is lost where chroma is sampled again."""
    y, x = np.mgrid[0:height, 0:width]
    return np.where((((x // 3 + y // 5) % 2) == 0)[..., None], np.uint8([220, 30, 40]), np.uint8([30, 60, 200]))


class TestJpeg:
    @pytest.mark.parametrize("quality", [95, 85, 60])
    @pytest.mark.parametrize("sampling", [0, 1, 2])
    @pytest.mark.parametrize("size", [(96, 64), (95, 61), (16, 1)])
    def test_it_is_written_as_it_was(self, quality, sampling, size):
        data = file_of(Image.fromarray(levels(*size)), "JPEG", quality=quality, subsampling=sampling)
        picture = to_editable(decode(data).image)
        written, notes = encode(picture, ".jpg")
        before, after = (Image.open(BytesIO(each)) for each in (data, written))
        assert after.quantization == before.quantization and after.layer == before.layer and notes == ()
        width, height = (side - side % 16 if side > 16 else side for side in size)  # blocks at edges hide pixels
        apart = np.abs(np.asarray(after).astype(int) - np.asarray(before))[:height, :width]
        assert apart.max() <= 6 and apart.mean() < 0.5, "with means of chroma as they are it is 40"

    @pytest.mark.parametrize("orientation", [2, 3, 5, 6, 8])
    def test_one_that_is_turned(self, orientation):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        table = [[10 + 3 * (i // 8) + i % 8 for i in range(64)]] * 2
        picture = Image.fromarray(levels())
        data = file_of(picture, "JPEG", qtables=table, subsampling=2, exif=exif)
        shown = to_editable(decode(data).image)
        after = np.asarray(decode(encode(shown, ".jpg")[0]).image).astype(int)
        assert np.abs(after - np.asarray(shown)).mean() < 0.3

    @pytest.mark.parametrize("mode", ["L", "CMYK"])
    def test_other_modes(self, mode):
        data = file_of(Image.fromarray(levels()).convert(mode), "JPEG", quality=70)
        picture = to_editable(decode(data).image)
        after = Image.open(BytesIO(encode(picture, ".jpg")[0]))
        assert after.mode == mode and after.quantization == Image.open(BytesIO(data)).quantization
        assert np.abs(np.asarray(after).astype(int) - np.asarray(picture)).max() <= 2

    def test_red_green_and_blue(self):
        data = file_of(Image.fromarray(levels()), "JPEG", quality=90, keep_rgb=True)
        picture = to_editable(decode(data).image)
        assert np.abs(np.asarray(decode(encode(picture, ".jpg")[0]).image).astype(int) - np.asarray(picture)).max() <= 1

    def test_progressive_ones_and_others_stay_so(self):
        for options in ({}, {"progressive": True}):
            data = file_of(scene(), "JPEG", **options)
            assert ("progressive" in decode(encode(to_editable(decode(data).image), ".jpg")[0]).image.info) == bool(
                options
            )

    def test_a_sessions_png_tells_the_form_and_another_does_not(self):
        form = to_editable(decode(file_of(scene(), "JPEG", quality=60)).image).info["form"]
        picture = to_editable(decode(file_of(scene(), "JPEG", quality=60)).image)
        assert to_editable(decode(encode(picture, ".png", keeps_form=True)[0]).image).info["form"] == form
        assert "form" not in to_editable(decode(encode(picture, ".png")[0]).image).info

    @pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"tables": [[1]], "sampling": [1, 1]}', b"\xff"])
    def test_a_damaged_form_is_none(self, data):
        assert "form" not in to_editable(decode(with_chunk(file_of(scene()), b"jpFM", data)).image).info

    def test_pictures_of_other_formats_have_quality_95(self):
        data = encode(to_editable(scene()), ".jpg")[0]
        assert (
            Image.open(BytesIO(data)).quantization
            == Image.open(BytesIO(file_of(scene(), "JPEG", quality=95))).quantization
        )
