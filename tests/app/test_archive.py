"""Session archives that are damaged or crafted: each is refused in one line, before anything of it is written."""

from __future__ import annotations

import bz2
import hashlib
import io
import json
import lzma
import random
import re
import struct
import tracemalloc
import zipfile
import zlib

import pytest
from PIL import Image

from app import archive
from fisedit.errors import FisEditError
from fisedit.sessions.files import file_name
from fisedit.sessions.index import encode_index
from fisedit.sessions.store import SessionStore
from tests.support.sessions import INDEX_CHANGES, STORED, contents, diff, saved

NAMES = ("generated", "opened", "look")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Archives of this version by the name of their session."""
    place = tmp_path_factory.mktemp("archives")
    return {name: archive.pack(saved(place / name, name)) for name in NAMES}


def members(data):
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def zipped(parts, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as packed:
        for name, data in parts if isinstance(parts, list) else parts.items():
            packed.writestr(name, data)
    return file.getvalue()


def opened(data, folder):
    """What an archive holds, once it is unpacked."""
    archive.unpack(data, folder, ["demo"])
    return SessionStore(folder, archive.ARCHIVE).load(diff)


def without_adapters(said):
    head, results = said
    return (*head[:3], {}, head[4]), results


@pytest.mark.parametrize("name", NAMES)
def test_what_was_packed_comes_back(packed, tmp_path, name):
    expected = contents(SessionStore(STORED / name).load(diff))
    assert contents(opened(packed[name], tmp_path / "new")) == without_adapters(expected)
    deflated = zipped(members(packed[name]), zipfile.ZIP_DEFLATED)
    assert contents(opened(deflated, tmp_path / "again")) == without_adapters(expected)


def said(change):
    """A session whose index says something else, with a digest that agrees."""

    def craft(packed, parts):
        index = json.loads(parts["session.json"])
        change(index)
        return zipped({**parts, "session.json": encode_index(index)})

    return craft


def many(count):
    def change(index):
        index["results"] = [{**index["results"][0], "id": str(n)} for n in range(count)]

    return change


def long_prompt(index):
    for entry in index["results"]:
        entry["recipe"]["prompt"] = "a cat " * 340_000


def part(name, data):
    return lambda packed, parts: zipped({**parts, name: data})


def pictures(endings, data, results=1):
    """A session whose first results have other files, with digests that agree."""

    def craft(packed, parts):
        kept, index = dict(parts), json.loads(parts["session.json"])
        for entry in index["results"][:results]:
            for ending in endings:
                kept.pop(file_name(entry["id"], ending, entry["files"].get(ending, "")), None)
                entry["files"][ending] = hashlib.sha256(data).hexdigest()
                kept[file_name(entry["id"], ending, entry["files"][ending])] = data
        return zipped({**kept, "session.json": encode_index(index)})

    return craft


def first_picture(names):
    return next(name for name in names if re.fullmatch(r"0-\w+\.png", name))


def stream(method, damage):
    """A member whose compressed bytes are damaged, or forged."""

    def craft(packed, parts):
        data = bytearray(zipped(parts, method))
        with zipfile.ZipFile(io.BytesIO(bytes(data))) as read:
            member = read.getinfo(first_picture(read.namelist()))
        start = member.header_offset + 30 + len(member.filename)
        damage(data, start, member.compress_size)
        return bytes(data)

    return craft


def noise(data, start, size):
    data[start : start + size] = random.Random(0).randbytes(size)


def zeros(data, start, size):
    data[start : start + size] = bytes(size)


def middle(data, start, size):
    data[start + size // 2] ^= 0xFF


def header(offset, form, value):
    """Another field in the central directory's first entry."""

    def craft(packed, parts):
        data = bytearray(zipped(parts, zipfile.ZIP_DEFLATED))
        struct.pack_into(form, data, data.index(b"PK\1\2") + offset, value)
        return bytes(data)

    return craft


def blank(size, kind="PNG"):
    file = io.BytesIO()
    Image.new("1", size).save(file, kind)
    return file.getvalue()


def claimed(width, height):
    """A PNG that claims a size and holds nothing of it."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))


ZIPS = {
    "no zip": lambda *_: b"PK no zip",
    "empty": lambda *_: b"",
    "half": lambda packed, parts: packed[: len(packed) // 2],
    "only the directory": lambda packed, parts: packed[packed.index(b"PK\1\2") :],
    "no index": lambda packed, parts: zipped({k: v for k, v in parts.items() if k != "session.json"}),
    "no members": lambda *_: zipped({}),
    "a path above": part("../session.json", b"{}"),
    "an absolute path": part("/etc/passwd", b"x"),
    "a path below": part("a/0.png", b"x"),
    "another file": part("run.sh", b"x"),
    "a null in a name": part("0-0123456789abcdef.png\0.sh", b"x"),
    "a file that the index does not name": part("99-0123456789abcdef.png", b"x"),
    "a member twice": lambda packed, parts: zipped([*parts.items(), (first_picture(parts), b"x")]),
    "two indices": lambda packed, parts: zipped([("session.json", b"{}"), *parts.items()]),
    "2,001 members": lambda packed, parts: zipped({f"{n}.png": b"" for n in range(2001)} | parts),
    "an index of 9 MiB": part("session.json", b"[" * (9 << 20)),
    "an index nested 100,000 deep": part("session.json", b"[" * 100_000),
    "an index of small lists": part("session.json", b"[" + b"[]," * (2 << 20) + b"[]]"),
    "an index that is none": part("session.json", b"{}"),
    "LZMA": lambda packed, parts: zipped(parts, zipfile.ZIP_LZMA),
    "BZIP2": lambda packed, parts: zipped(parts, zipfile.ZIP_BZIP2),
    "a damaged LZMA stream": stream(zipfile.ZIP_LZMA, noise),
    "a damaged BZIP2 stream": stream(zipfile.ZIP_BZIP2, noise),
    "a damaged deflate stream": stream(zipfile.ZIP_DEFLATED, noise),
    "a deflate stream of zeros": stream(zipfile.ZIP_DEFLATED, zeros),
    "a deflate stream with another byte": stream(zipfile.ZIP_DEFLATED, middle),
    "a stored picture with another byte": stream(zipfile.ZIP_STORED, middle),
    "encrypted": header(8, "<H", 1),
    "an unknown method": header(10, "<H", 77),
    "another checksum": header(16, "<I", 1),
    "a size of 4 GiB": header(24, "<I", 0xFFFFFFFE),
    "a size of 0": header(24, "<I", 0),
    "an offset beyond the end": header(42, "<I", 0x7FFFFFFF),
    "a version of the future": header(6, "<H", 99),
    "a picture that is none": pictures([".png"], b"no picture"),
    "an empty picture": pictures([".png"], b""),
    "a picture of 3.6 gigapixels": pictures([".png"], claimed(60_000, 60_000)),
    "a mask of 40 million pixels": pictures([".mask.png"], blank((8000, 5000))),
    "a mask of another format": pictures([".mask.png"], blank((16, 16), "GIF")),
    "a picture that is a bzip2 stream": pictures([".png"], bz2.compress(b"0" * 100)),
    "a picture that is an LZMA stream": pictures([".png"], lzma.compress(b"0" * 100)),
    "more pixels than a gigabyte holds": pictures([".png", ".mask.png", ".canvas.png"], blank((6000, 5000)), 4),
    "900 results": said(many(900)),
    "201 results": said(many(201)),
    "a prompt of two million letters": said(long_prompt),
}
CRAFTED = ZIPS | {f"an index, {case}": said(change) for case, change in INDEX_CHANGES.items()}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_crafted_archives_are_refused_before_anything_is_written(packed, tmp_path):
    parts = members(packed["generated"])
    assert len(CRAFTED) > 89
    taken = {}
    for number, (case, craft) in enumerate(CRAFTED.items()):
        folder, data = tmp_path / str(number), craft(packed["generated"], parts)
        if case in ZIPS:
            tracemalloc.start()
        try:
            archive.unpack(data, folder, ["demo"])
        except FisEditError as error:
            text = str(error)
            assert "\n" not in text and len(text) < 300 and str(tmp_path) not in text, (case, text)
        else:
            taken[case] = "accepted"
        assert not folder.exists(), case
        if tracemalloc.get_traced_memory()[1] > 200 << 20:
            taken[case] = f"{tracemalloc.get_traced_memory()[1] >> 20} MiB"
        tracemalloc.stop()
    assert taken == {}


def test_a_mask_of_pixels_is_packed(packed, tmp_path):
    pixels = io.BytesIO()
    Image.new("L", (128, 128), 200).save(pixels, "PNG")
    data = pictures([".pixels.png"], pixels.getvalue())(None, members(packed["generated"]))
    assert opened(data, tmp_path / "new").history.find("0").mask.pixels.mean() == 200


def test_no_flipped_bit_of_an_archive_is_silent(packed, tmp_path):
    rng, silent = random.Random(3), []
    for number in range(100):
        name = NAMES[number % 3]
        data = bytearray(packed[name])
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        expected = without_adapters(contents(SessionStore(STORED / name).load(diff)))
        try:
            if contents(opened(bytes(data), tmp_path / str(number))) != expected:
                silent.append((name, bit))
        except FisEditError:
            continue
    assert silent == []


def test_what_could_not_be_opened_again_is_not_packed(tmp_path, monkeypatch):
    folder = saved(tmp_path / "s")
    monkeypatch.setattr(archive, "LIMITS", archive.Limits(results=3))
    with pytest.raises(FisEditError, match=r"could not be opened again: .* at most 3 results, got 4"):
        archive.pack(folder)
