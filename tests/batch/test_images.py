"""Pictures and masks of every kind through `fisedit batch`: what no mask covers comes back as a viewer saw it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps
from PIL.PngImagePlugin import PngInfo

from tests.support.folders import half, picture, tree

SAID = ("--prompt", "a dog and a cake on a beach", "--source-prompt", "a cat and a cake on a beach")
ICC = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
ORIENTATION = 0x0112
LOSS = 8
"""Levels, of 255, by which noise in a JPEG of quality 95 differs from itself, on average and at most."""


@dataclass(frozen=True)
class Edited:
    """A picture before and after, as a viewer shows it, RGB; and what was said of it."""

    before: Image.Image
    after: Image.Image
    notes: tuple[str, ...]

    def apart(self, *, right: bool) -> float:
        """Mean difference of the halves, 0 to 255; of the right one without the cell that the mask may share."""
        one, other = (np.asarray(image).astype(float) for image in (self.before, self.after))
        width = one.shape[1]
        columns = slice(width // 2 + -(-width // 8), None) if right else slice(0, width // 2)
        return float(np.abs(one - other)[:, columns].mean())

    def is_left_alone_at_the_right(self, loss: float = 0) -> bool:
        return self.before.size == self.after.size and self.apart(right=True) <= loss < self.apart(right=False)


@pytest.fixture
def edit(fisedit, tmp_path, model) -> Callable[..., Mapping[str, Edited]]:
    """Edits the pictures of "in", by default each with a mask of its left half."""

    def run(mask: Callable[[Path], object] = half) -> dict[str, Edited]:
        for path in (tmp_path / "in").iterdir():
            mask(tmp_path / f"masks/{path.stem}.png")
        before = tree(tmp_path)
        words = ("--masks", "masks", "--model", model, "--num-inference-steps", 2, "--workers", 0, "--json")
        ran = fisedit("batch", "in", "out", *SAID, *words)
        assert (ran.status, ran.err) == (0, ""), ran.out
        assert before.items() <= tree(tmp_path).items(), "no input is touched"
        items = json.loads(ran.out)["items"]
        shown = {item["image"]: [shows(tmp_path / "in" / item["image"]), shows(tmp_path / "out" / item["output"])]
                 for item in items}  # fmt: skip
        return {item["image"]: Edited(*shown[item["image"]], tuple(item["notes"])) for item in items}

    (tmp_path / "in").mkdir()
    (tmp_path / "masks").mkdir()
    return run


def shows(path: Path) -> Image.Image:
    """What Pillow makes of a file on its own; damaged EXIF turns nothing."""
    with Image.open(path) as image:
        image.load()
        with suppress(SyntaxError):
            return ImageOps.exif_transpose(image).convert("RGB")
        return image.convert("RGB")


def noise(mode: str, width: int = 64, height: int = 64) -> Image.Image:
    """Every value of every band, at random."""
    levels = np.random.default_rng(0).integers(0, 256, (height, width, 4), np.uint8)
    if mode == "I;16":
        return Image.fromarray(levels[..., 0].astype(np.uint16) * 256 + levels[..., 1])
    if mode in ("1", "P"):
        return Image.fromarray(levels[..., :3].copy()).convert(mode)
    return Image.frombytes(mode, (width, height), levels[..., : len(Image.new(mode, (1, 1)).getbands())].tobytes())


@pytest.mark.slow
def test_orientations(edit, tmp_path):
    for n in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = n
        noise("RGB", 48, 32).save(tmp_path / f"in/{n}.jpg", quality=95, exif=exif)
    edited = edit()
    for n in range(1, 9):
        one = edited[f"{n}.jpg"]
        assert one.after.size == ((48, 32) if n < 5 else (32, 48)) and one.is_left_alone_at_the_right(LOSS), n


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1), (7, 9), (1, 20_000), (20_000, 1), (65, 63)])
def test_sizes(edit, tmp_path, size):
    picture(tmp_path / "in/a.png", 1, size)
    one = edit()["a.png"]
    assert one.after.size == one.before.size == size
    assert size[0] == 1 or one.is_left_alone_at_the_right()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("a.jpg", "CMYK"),
        ("a.tif", "CMYK"),
        ("a.jpg", "L"),
        ("a.png", "P"),
        ("a.gif", "P"),
        ("a.bmp", "P"),
        ("a.png", "1"),
        ("a.tif", "1"),
        ("a.png", "LA"),
        ("a.webp", "RGBA"),
    ],
)
def test_modes(edit, tmp_path, name, mode):
    noise(mode).save(tmp_path / "in" / name, **({"lossless": True, "exact": True} if name == "a.webp" else {}))
    with Image.open(tmp_path / "in" / name) as stored:
        assert stored.mode == mode
    assert edit()[name].is_left_alone_at_the_right(LOSS if name == "a.jpg" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_stay(edit, tmp_path, name):
    noise("I;16").save(tmp_path / "in" / name)
    edit()
    one, other = (np.asarray(Image.open(tmp_path / where / name)) for where in ("in", "out"))
    assert one.dtype == other.dtype == np.uint16
    assert np.array_equal(one[:, 32:], other[:, 32:]) and not np.array_equal(one, other)


def test_lab_is_shown_in_rgb(edit, tmp_path):
    """Two profiles lead there, so that a colour may move by rounding."""
    grey = Image.merge("LAB", [Image.linear_gradient("L").resize((64, 64)), *[Image.new("L", (64, 64), 128)] * 2])
    grey.save(tmp_path / "in/a.tif")
    edit()
    with Image.open(tmp_path / "out/a.tif") as after:
        assert after.mode == "RGB" and after.size == (64, 64)
        pixels = np.asarray(after)[:, 40:].astype(int)
    assert np.ptp(pixels, axis=2).max() <= 3 and pixels[0].max() < 10 and pixels[-1].min() > 245


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_metadata_damaged_and_huge(edit, tmp_path):
    good = noise("RGB")
    for name, profile in {"text": b"no profile", "cut": ICC[:200], "huge": ICC + bytes(900_000)}.items():
        good.save(tmp_path / f"in/profile {name}.png", icc_profile=profile)
    begun = b"Exif\0\0II*\0\x08\0\0\0"
    for name, told in {"cut": begun + b"\xff" * 42, "huge": begun + bytes(65_000), "none": b"Exif\0\0 no"}.items():
        good.save(tmp_path / f"in/exif {name}.jpg", quality=95, exif=told)
    good.save(tmp_path / "in/comment.jpg", quality=95, comment=b"\xff\0<script>" * 5_000)
    said = PngInfo()
    said.add_text("Comment", "x" * 500_000, zip=True)
    said.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta>" * 50_000)
    good.save(tmp_path / "in/text.png", pnginfo=said)
    edited = edit()
    assert len(edited) == 8
    for name, one in edited.items():
        assert one.is_left_alone_at_the_right(LOSS if name.endswith("jpg") else 0), name


def test_of_an_animation_the_first_frame(edit, tmp_path):
    frames = [noise("RGB").quantize(64), Image.new("P", (64, 64))]
    frames[0].save(tmp_path / "in/a.gif", save_all=True, append_images=frames[1:])
    one = edit()["a.gif"]
    assert one.is_left_alone_at_the_right() and one.notes == ("animated: the first of 2 frames was edited",)


def test_a_mask_of_everything_is_dense(edit, tmp_path):
    picture(tmp_path / "in/a.png")
    one = edit(lambda path: Image.new("1", (64, 64), 1).save(path))["a.png"]
    assert any(note.startswith("the whole picture is painted: ") for note in one.notes)
    assert one.apart(right=True) > 0 < one.apart(right=False)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["L", "RGB", "LA", "I;16"])
def test_a_soft_mask_is_cut_at_its_half(edit, tmp_path, mode):
    """White at the left fading to black at the right, in grey, coloured, with alpha instead, or with 16 bits."""
    picture(tmp_path / "in/a.png")
    fade = Image.fromarray(np.tile(np.linspace(255, 0, 64).astype(np.uint8), (64, 1)))

    def soft(path: Path) -> None:
        masks = {
            "L": fade,
            "RGB": Image.merge("RGB", [fade] * 3),
            "LA": Image.merge("LA", [Image.new("L", fade.size, 255), fade]),
            "I;16": Image.fromarray(np.asarray(fade).astype(np.uint16) * 257),
        }
        masks[mode].save(path)

    assert edit(soft)["a.png"].is_left_alone_at_the_right()
