"""Opening pictures: the path back to noise, and everything a file may be that must come back as it was."""

from __future__ import annotations

from functools import cache
from io import BytesIO

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from PIL import Image, ImageCms

from fisedit import Editor
from fisedit.errors import InputError, MaskError, PromptError, SessionError
from fisedit.models.vae import encode
from fisedit.sampling import denoise
from fisedit.storage import images
from fisedit.storage.canvas import to_canvas, to_editable, to_srgb
from fisedit.values import LATENT_FACTOR, ActiveCells, EditKind, MaskSource
from tests.support import oracle
from tests.support.edits import BIRD, CAT, DOG, Calls, latents, trajectory, unwatched
from tests.support.grids import grids
from tests.support.pictures import noise, scene
from tests.support.pipelines import SHAPES, diffedit
from tests.support.sessions import file_of

SQUARE, BLOBS, CORNER = (grids(16, 16)[name] for name in ("square", "blobs", "corner"))
NOWHERE = np.zeros((16, 16), bool)
STEPS = 3
QUICK = {"num_inference_steps": STEPS}


def opened(editor, picture, **options):
    return editor.open(picture, CAT, **(QUICK | options))


class TestInversion:
    @pytest.mark.sweep(1)
    @pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "sdxl"])  # of which diffusers has none
    @pytest.mark.parametrize(("steps", "size"), [(3, (128, 128)), (7, (136, 104))])
    def test_the_path_is_that_of_diffedit(self, pipelines, shape, steps, size):
        """diffusers' own pipeline, from the same clean latents, its UNet told the time that its latents have."""
        pipe = pipelines[shape]
        editor = Editor(pipe)
        result = opened(editor, scene(*size), num_inference_steps=steps)
        with torch.no_grad():
            ours = latents(trajectory(editor, result))
            clean = pipe.vae.encode(pixels(result.image)).latent_dist.mode() * pipe.vae.config.scaling_factor

        def on_time(_, given):
            return given[0], (given[1] - 1000 // steps).clamp(min=0), *given[2:]

        watched = pipe.unet.register_forward_pre_hook(on_time)
        try:
            expected = diffedit(pipe).invert(
                *(CAT, ours[-1:]), num_inference_steps=steps, inpaint_strength=1.0, guidance_scale=1.0,
                output_type="latent",
            )  # fmt: skip
        finally:
            watched.remove()
        assert oracle.deviation(ours[-1:], clean) <= 1e-4
        assert ours[:-1].shape == expected.latents[0].shape
        assert oracle.deviation(ours[:-1], expected.latents[0]) <= 1e-4

    @pytest.mark.parametrize("guidance", [4.0, 1.0])
    def test_it_is_recorded_in_one_pass(self, editor, guidance):
        """One evaluation of every latents, the clean ones included; and what is recorded with them is what the engine
        records when it passes there."""
        seen = []
        with Calls(editor.pipe.unet) as calls:
            source = opened(editor, scene(), guidance_scale=guidance, on_step=lambda i, n, _: seen.append((i, n)))
        assert calls.dense == source.stats.unet_evaluations_dense == STEPS + 1
        assert source.stats.macs - source.stats.macs_dense == editor._engine.costs(source.config).dense_step() // (
            1 + (guidance > 1)
        )
        assert seen == [(i, STEPS) for i in range(STEPS)]
        told, engine = trajectory(editor, source), editor._engine
        again = denoise.run_dense(
            engine, source.config, engine.encode(source.config), unwatched, (ActiveCells(NOWHERE), told)
        )
        assert torch.equal(latents(again), latents(told)) and len(told.features) == STEPS
        for ours, theirs in zip(again.features, told.features, strict=True):
            assert ours.maps.keys() == theirs.maps.keys() and ours.statistics.keys() == theirs.statistics.keys()
            assert all(torch.equal(ours.maps[key], theirs.maps[key]) for key in ours.maps)
            assert all(torch.equal(ours.statistics[key], theirs.statistics[key]) for key in ours.statistics)

    def test_the_record_is_the_samplers_along_the_path(self, pipelines):
        """Predictions are those that a guided sampler makes of the path's latents."""
        pipe = pipelines["demo"]
        editor = Editor(pipe)
        told = trajectory(editor, opened(editor, scene(), guidance_scale=4.0))
        with torch.no_grad():
            text, empty = pipe.encode_prompt(CAT, pipe.device, 1, True)
            pipe.scheduler.set_timesteps(STEPS)
            for x, t, ours in zip(told.latents, pipe.scheduler.timesteps, told.predictions, strict=False):
                without, with_text = (pipe.unet(x, t, each)[0] for each in (empty, text))
                assert oracle.deviation(ours, without + 4 * (with_text - without)) <= 1e-4

    def test_timesteps_without_an_inverse(self, pipelines):
        pipe = pipelines["demo"]
        scheduler = DDIMScheduler.from_config(pipe.scheduler.config, timestep_spacing="linspace")
        editor = Editor(
            StableDiffusionPipeline(**pipe.components | {"scheduler": scheduler}, requires_safety_checker=False)
        )
        with pytest.raises(InputError, match=r'spaced leading or trailing, got linspace; use inversion="ddpm"'):
            opened(editor, scene())
        assert opened(editor, scene(), inversion="ddpm").config.inversion == "ddpm"


def pixels(picture):
    """[1, 3, H, W] in -1 to 1."""
    return 2 * (torch.from_numpy(np.array(picture).transpose(2, 0, 1).copy())[None] / 255) - 1


class TestWithoutCaption:
    @pytest.fixture
    def source(self, editor):
        return editor.open(scene(), **QUICK)

    def test_it_is_recorded_with_the_empty_prompt(self, editor, source):
        assert source.prompt == "" and source.config.opened
        with torch.no_grad():
            empty, _ = editor.pipe.encode_prompt("", editor.pipe.device, 1, False)
        key = editor.pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k
        recorded = trajectory(editor, source).text_keys["mid_block.attentions.0.transformer_blocks.0.attn2.to_k"]
        assert torch.equal(recorded[-1:], key(empty))

    def test_the_things_that_a_prompt_names_say_where(self, editor, source):
        """What the same words say of a picture whose caption had none of them."""
        with Calls(editor.pipe.unet) as calls:
            seen = editor.preview("a dog")
            heat = editor.attention("a red dog")
        assert calls.dense == calls.sparse == 0
        assert str(seen.diff) == "+ a dog" and seen.diff.kind is EditKind.INSERT
        assert seen.mask.source is MaskSource.ATTENTION and 0 < seen.mask.area < 1
        assert heat.shape == (16, 16) and 0 <= heat.min() < heat.max() <= 1
        assert np.array_equal(
            editor.preview("a red dog", words=["dog"]).mask.grid, editor.preview("a red dog").mask.grid
        )

    def test_an_edit_of_it(self, editor, source):
        with Calls(editor.pipe.unet) as calls:
            result = editor.edit("a dog", growth=0, verify=False)
        assert calls.sparse + calls.dense == STEPS and result.prompt == "a dog"
        outside = ~inside_of(result.mask.grid, (128, 128))
        assert np.array_equal(np.asarray(result.image)[outside], np.asarray(source.image)[outside])
        assert editor.edit("a bird", growth=0).diff.kind is EditKind.REPLACE

    @pytest.mark.parametrize(
        ("prompt", "why"),
        [
            ("a dog on a beach", '"beach" changes the scene'),
            ("a watercolor of a dog", '"watercolor" changes the style'),
            ("!!!", "the change points at no thing"),
        ],
    )
    def test_a_scene_runs_dense_and_says_so(self, editor, source, prompt, why):
        result = editor.edit(prompt)
        told = "and no prompt says what it shows; open it with one, or give words or a mask"
        assert result.stats.fallback == f"global edit: {why}, {told}"
        assert result.stats.unet_evaluations_dense == STEPS and result.mask.grid.all()

    def test_words_and_masks_make_a_scene_local(self, editor, source):
        assert not editor.preview("a dog on a beach", words=["dog"]).mask.grid.all()
        assert np.array_equal(editor.preview("a dog on a beach", mask=SQUARE).mask.grid, SQUARE)

    def test_a_described_picture_is_edited_by_what_changed(self, editor):
        opened(editor, scene())
        assert editor.preview(DOG).diff.kind is EditKind.REPLACE


def palette(*, clear):
    picture = noise("RGB", 40, 30).quantize(16)
    if clear:
        picture.info["transparency"] = 3
    return picture


def keyed(mode):
    """A picture in which one colour counts as transparent."""
    picture = noise(mode, 40, 30)
    picture.info["transparency"] = picture.getpixel((5, 5))
    return picture


def deep():
    return Image.fromarray(np.random.default_rng(1).integers(0, 2**16, (30, 40), np.uint16))


KINDS = {
    "RGB": (scene(), "RGB"),
    "RGB of another size": (noise("RGB", 40, 30), "RGB"),
    "RGBA": (noise("RGBA", 40, 30), "RGBA"),
    "RGBA at the canvas' size": (noise("RGBA"), "RGBA"),
    "RGB with a clear colour": (keyed("RGB"), "RGBA"),
    "L": (noise("L", 40, 30), "L"),
    "L with a clear level": (keyed("L"), "LA"),
    "LA": (noise("LA", 40, 30), "LA"),
    "P": (palette(clear=False), "RGB"),
    "P with a clear colour": (palette(clear=True), "RGBA"),
    "1": (noise("L", 40, 30).convert("1"), "L"),
    "I;16": (deep(), "I;16"),
    "I;16B": (Image.frombytes("I;16B", (40, 30), np.asarray(deep()).astype(">u2").tobytes()), "I;16"),
    "I": (Image.fromarray(np.asarray(deep()).astype(np.int32)), "I;16"),
    "CMYK": (noise("CMYK", 40, 30), "CMYK"),
    "YCbCr": (noise("RGB", 40, 30).convert("YCbCr"), "RGB"),
    "HSV": (noise("RGB", 40, 30).convert("HSV"), "RGB"),
}


def expected_values(name, picture):
    """What Pillow, or numpy for depths that it would clip, takes a picture for."""
    if name.startswith("I"):
        return np.asarray(deep())
    return np.asarray(picture.convert(KINDS[name][1]))


def inside_of(grid, size):
    """Pixels [H, W] in a mask, each by its middle, one by one."""
    width, height = size
    h, w = grid.shape
    return np.array([[grid[(2 * y + 1) * h // (2 * height), (2 * x + 1) * w // (2 * width)] for x in range(width)]
                     for y in range(height)])  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_outside_every_pixel_is_the_originals(editor, name):
    picture, mode = KINDS[name]
    before = picture.tobytes()
    source = opened(editor, picture)
    values = expected_values(name, picture)
    assert source.image.mode == mode and np.array_equal(np.asarray(source.image), values)
    grid = grids(*source.mask.grid.shape)["square"]
    result = editor.edit(DOG, mask=grid, growth=1)
    assert (result.image.mode, result.image.size) == (mode, picture.size)
    inside, edited = inside_of(grid, picture.size), np.asarray(result.image)
    assert np.array_equal(edited[~inside], values[~inside])
    assert (edited[inside] != values[inside]).any()
    if mode.endswith("A"):  # what is painted can be seen
        assert (edited[inside][..., -1] == 255).all()
    assert picture.tobytes() == before


def test_paint_has_the_pictures_depth(editor):
    """What is painted on 16-bit grey is the canvas' grey, scaled, and not a dark 8-bit one."""
    opened(editor, Image.fromarray(np.full((128, 128), 40_000, np.uint16)))
    result = editor.edit(DOG, mask=SQUARE, growth=1)
    grey = np.asarray(result.canvas.convert("L")).astype(int)
    inside = inside_of(SQUARE, (128, 128))
    assert np.array_equal(np.asarray(result.image)[inside], grey[inside] * 257)


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (300, 7), (129, 127), (1000, 700), (1, 2000)])
def test_any_size_comes_back(editor, size):
    picture = scene(*size)
    source = opened(editor, picture)
    h, w = source.mask.grid.shape
    assert source.config.width == w * LATENT_FACTOR and source.config.height == h * LATENT_FACTOR
    grid = np.zeros((h, w), bool)
    grid[h // 4 : h // 2 + 1, w // 4 : w // 2 + 1] = True
    result = editor.edit(DOG, mask=grid, growth=1)
    inside = inside_of(grid, size)
    assert inside.any() and result.image.size == size
    assert np.array_equal(np.asarray(result.image)[~inside], np.asarray(picture)[~inside])
    assert (np.asarray(result.image)[inside] != np.asarray(picture)[inside]).any()


@pytest.mark.parametrize(("size", "told"), [((250, 250), False), ((420, 280), True), ((128, 128), False)])
def test_coarse_paint_is_told(editor, size, told):
    """Once the picture is twice as large as what the model paints on; a larger canvas helps."""
    opened(editor, scene(*size))
    notes = editor.edit(DOG, mask=BLOBS if size[0] == size[1] else grids(13, 20)["blobs"], growth=1).stats.notes
    assert any("painted on 160x104 pixels and enlarged 2.7 times; paint or box" in note for note in notes) is told
    opened(editor, scene(*size), width=216, height=144)
    assert not any("enlarged" in note for note in editor.edit(DOG, mask=grids(18, 27)["square"]).stats.notes)


@pytest.mark.parametrize("size", [(128, 128), (100, 50), (500, 260), (5, 3)])
def test_a_mask_of_the_pictures_own_size(editor, size):
    width, height = size
    opened(editor, scene(*size))
    marks = np.zeros((height, width), bool)
    marks[height // 2, width // 2] = True
    image = Image.fromarray(marks.astype(np.uint8) * 255)
    seen = editor.preview(DOG, mask=image)
    h, w = seen.mask.grid.shape
    assert inside_of(seen.mask.grid, size)[marks].all()
    assert seen.mask.grid.sum() <= max(1, (h // height + 1) * (w // width + 1))
    rest = editor.preview(DOG, mask=np.ones((h, w), bool), protect=image).mask
    assert np.array_equal(rest.painted(size), ~marks)
    with pytest.raises(MaskError, match=f"the picture's {width}x{height} pixels"):
        editor.edit(DOG, mask=np.ones((height + 1, width), np.uint8))


TURNS = {  # what a viewer does with the stored pixels, by the EXIF standard's table
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[::-1],
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("ending", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_pictures_are_turned_upright(orientation, ending):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = BytesIO()
    plain = BytesIO()
    options = {"lossless": True} if ending == "WEBP" else {}
    scene(24, 16).save(plain, ending, **options)
    scene(24, 16).save(file, ending, exif=exif, **options)
    stored, result = np.asarray(Image.open(plain)), to_editable(Image.open(file))
    assert np.array_equal(np.asarray(result), TURNS[orientation](stored))
    assert not result.info.keys() - {"form"} and np.array_equal(np.asarray(to_editable(result)), np.asarray(result))


def test_what_is_not_kept_of_a_file_is_told_when_it_is_opened(model):
    film = b'<x:a xmlns:x="adobe:ns:meta/" xmlns:G="http://ns.google.com/photos/1.0/camera/" G:MotionPhoto="1"/>'
    file = BytesIO()
    scene(64, 64).save(file, "JPEG", xmp=film)
    opened = Editor.from_pretrained(model).open(Image.open(file), "a cat", num_inference_steps=1, width=64, height=64)
    assert opened.stats.notes == ("left out, as it does not fit the edited picture: its film",)


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0no exif", b"Exif\0\0" + bytes(90), b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\xff" * 40]
)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_says_nothing(exif):
    file = BytesIO()
    scene(24, 16).save(file, "JPEG", exif=exif)
    picture = Image.open(file)
    assert to_editable(picture).tobytes() == picture.convert("RGB").tobytes()


@cache
def swapped_profile():
    """An sRGB profile whose red is the display's green, and the other way round."""
    known = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for old, new in ((b"rXYZ", b"xXYZ"), (b"gXYZ", b"rXYZ"), (b"xXYZ", b"gXYZ")):
        known = known.replace(old, new)
    return known


def with_profile():
    picture = scene()
    picture.info["icc_profile"] = swapped_profile()
    return picture


class TestProfiles:
    def test_the_model_sees_the_colours_that_a_screen_shows(self):
        picture = scene(64, 64)
        picture.info["icc_profile"] = swapped_profile()
        seen, stored = (np.asarray(p).astype(int) for p in (to_canvas(to_editable(picture), (64, 64)), picture))
        assert np.abs(seen - stored[..., [1, 0, 2]]).max() <= 2

    def test_paint_returns_in_the_pictures_colours(self, editor):
        picture = with_profile()
        opened(editor, picture)
        result = editor.edit(DOG, mask=SQUARE, growth=1)
        assert result.image.info["icc_profile"] == swapped_profile()
        inside = inside_of(SQUARE, (128, 128))
        edited, painted = (np.asarray(p).astype(int) for p in (result.image, result.canvas))
        assert np.array_equal(edited[~inside], np.asarray(picture)[~inside])
        assert np.abs(edited[inside] - painted[inside][:, [1, 0, 2]]).max() <= 2

    @pytest.mark.sweep(1)
    @pytest.mark.parametrize("profile", [b"", b"no profile", swapped_profile()[:200]])
    @pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
    def test_a_damaged_profile_is_as_none(self, profile, mode):
        picture = noise(mode, 32, 32)
        picture.info["icc_profile"] = profile
        assert to_canvas(to_editable(picture), (32, 32)).tobytes() == picture.convert("RGB").tobytes()

    @pytest.mark.parametrize("name", ["a.png", "a.webp", "a.jpg", "a.tif"])
    def test_it_survives_a_file(self, editor, tmp_path, name):
        opened(editor, with_profile())
        images.write_image(editor.edit(DOG, mask=SQUARE, growth=1).image, tmp_path / name)
        assert Image.open(tmp_path / name).info["icc_profile"] == swapped_profile()


MODES = ["RGB", "RGBA", "L", "LA", "I;16", "CMYK"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ending", [".png", ".tif", ".webp"])
def test_files_hold_what_they_can(tmp_path, mode, ending):
    """PNG and TIFF hold every mode but PNG no CMYK; WebP holds RGB and RGBA, to which grey is the same."""
    picture = deep() if mode == "I;16" else noise(mode, 40, 30)
    images.write_image(picture, tmp_path / f"a{ending}")
    back = Image.open(tmp_path / f"a{ending}")
    if (mode, ending) in {("CMYK", ".png"), ("CMYK", ".webp"), ("I;16", ".webp")}:
        assert back.mode == "RGB" and back.tobytes() == to_srgb(picture, alpha=True).tobytes()
    elif ending == ".webp":
        visible = np.asarray(picture.convert("RGBA"))[..., 3] > 0
        assert np.array_equal(np.asarray(back.convert("RGBA"))[visible], np.asarray(picture.convert("RGBA"))[visible])
    else:
        assert back.mode == mode and back.tobytes() == picture.tobytes()


def test_a_jpeg_shows_what_it_cannot_hold(tmp_path):
    """Alpha over white; 16 bits scaled and not clipped."""
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 51))
    for name, picture, colour in (
        ("rgba", clear, (255, 204, 204)),
        ("la", Image.new("LA", (16, 16), (0, 0)), (255, 255, 255)),
        ("deep", Image.fromarray(np.full((16, 16), 100 * 257, np.uint16)), (100, 100, 100)),
    ):
        images.write_image(picture, tmp_path / f"{name}.jpg")
        back = np.asarray(Image.open(tmp_path / f"{name}.jpg").convert("RGB")).astype(int)
        assert np.abs(back - colour).max() <= 3, name


def test_a_jpeg_of_ink_stays_ink(tmp_path):
    picture = Image.new("CMYK", (16, 16), (10, 200, 30, 40))
    images.write_image(picture, tmp_path / "a.jpg")
    back = Image.open(tmp_path / "a.jpg")
    assert back.mode == "CMYK" and np.abs(np.asarray(back).astype(int) - np.asarray(picture)).max() <= 3


CHAIN = [(DOG, SQUARE), (BIRD, BLOBS), (CAT, CORNER)]


def test_a_chain_of_edits_and_the_way_back(editor):
    picture = noise("RGBA", 90, 70)
    source = opened(editor, picture)
    h, w = source.mask.grid.shape
    places = [grids(h, w)[name] for name in ("square", "blobs", "corner")]
    with Calls(editor.pipe.unet) as calls:
        results = [editor.edit(p, mask=g, growth=1) for p, g in zip((DOG, BIRD, CAT), places, strict=True)]
        assert editor.undo() is results[1] and editor.undo() is results[0] and editor.undo() is source
        with pytest.raises(SessionError, match="nothing to undo"):
            editor.undo()
        editor.checkout(results[1].id)
        again = editor.edit(CAT, mask=places[2], growth=1)
    assert (calls.dense, calls.sparse) == (0, 4 * STEPS)
    assert again.image.tobytes() == results[2].image.tobytes()
    for result, parent, grid in zip(results, [source, *results], places, strict=False):
        outside = ~inside_of(grid, picture.size)
        assert np.array_equal(np.asarray(result.image)[outside], np.asarray(parent.image)[outside])
        assert not np.array_equal(np.asarray(result.image), np.asarray(parent.image))


PLAIN, OTHER = scene(), noise("LA", 100, 60)


@pytest.mark.parametrize("picture", [PLAIN, OTHER], ids=["canvas", "LA"])
def test_what_was_dropped_is_rebuilt(pipelines, picture):
    def run(budget):
        editor = Editor(pipelines["shallow"], max_recorded_bytes=budget)
        opened(editor, picture)
        editor.edit(DOG, grow=1)
        editor.edit("a dog and a cake at night")
        editor.checkout("1")
        editor.edit(BIRD, growth=1)
        return [result.image.tobytes() for result in editor.history]

    assert run(0) == run(None)


SAVED = {
    "canvas": PLAIN,
    "LA": OTHER,
    "CMYK": noise("CMYK", 100, 60),
    "I;16": deep(),
    "P": palette(clear=True),
    "profile": with_profile(),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in ("CMYK", "I;16", "profile") else pytest.mark.slow) for k in SAVED]
)
@pytest.mark.slow
def test_a_session_comes_back_whole(model, tmp_path, kind):
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    opened(editor, SAVED[kind])
    editor.edit(DOG)
    editor.save(tmp_path)
    again = Editor.resume(tmp_path, device="cpu")
    for ours, theirs in zip(again.history, editor.history, strict=True):
        assert (ours.image.mode, ours.image.info) == (theirs.image.mode, theirs.image.info)
        assert ours.image.tobytes() == theirs.image.tobytes() and ours.canvas.tobytes() == theirs.canvas.tobytes()
        assert ours.config == theirs.config
    for result_id in ("0", "1"):
        again.checkout(result_id), editor.checkout(result_id)
        assert again.edit(BIRD).image.tobytes() == editor.edit(BIRD).image.tobytes()


def test_a_session_with_half_a_picture(model, tmp_path):
    editor = Editor.from_pretrained(model, device="cpu", dtype="fp32")
    opened(editor, OTHER)
    editor.save(tmp_path)
    for ending in (".png", ".canvas.png"):
        path = file_of(tmp_path, 0, ending)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SessionError, match="is damaged"):
            Editor.resume(tmp_path, device="cpu")
        path.write_bytes(whole)


REFUSED = [
    ({"picture": "cat.png"}, InputError, "picture must be a PIL image, got str; open files with PIL.Image.open"),
    ({"picture": None}, InputError, "got NoneType"),
    ({"picture": np.zeros((8, 8, 3))}, InputError, "got ndarray"),
    ({"picture": Image.new("RGB", (0, 5))}, InputError, "picture must have pixels, got 0x5"),
    ({"picture": Image.new("F", (8, 8))}, InputError, r"must have levels of 8 or 16 bits, got floats \(mode F\)"),
    ({"picture": Image.new("I", (8, 8), -1)}, InputError, "must have levels from 0 to 65535, got -1 to -1; scale them"),
    ({"picture": Image.new("I", (8, 8), 65536)}, InputError, "got 65536 to 65536"),
    ({"prompt": " "}, PromptError, "prompt must say something"),
    ({"prompt": 7}, PromptError, "prompt must be text, got int"),
    ({"negative_prompt": None}, PromptError, "negative_prompt must be text"),
    ({"num_inference_steps": 0}, InputError, "num_inference_steps must be a whole number"),
    ({"guidance_scale": -1}, InputError, "guidance_scale must be in"),
    ({"width": 100}, InputError, "width must be divisible by 8, got 100; use 96"),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED)
def test_refused_in_one_line(editor, given, error, message):
    with Calls(editor.pipe.unet) as calls, pytest.raises(error, match=message) as caught:
        editor.open(**({"picture": PLAIN, "prompt": CAT} | QUICK | given))
    assert "\n" not in str(caught.value)
    assert calls.dense == 0 and len(editor.history) == 0


def test_lab_becomes_rgb():
    """Its colours, as Pillow's own transform to it made them."""
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    picture = scene(32, 32)
    result = to_editable(ImageCms.profileToProfile(picture, srgb, lab, outputMode="LAB"))
    assert result.mode == "RGB" and np.abs(np.asarray(result).astype(int) - np.asarray(picture)).mean() <= 2


def test_the_canvas_may_be_chosen(editor):
    source = opened(editor, noise("RGB", 40, 30), width=96, height=64)
    assert source.canvas.size == (96, 64) and source.image.size == (40, 30)
    with torch.no_grad():
        expected = encode(editor.pipe.vae, noise("RGB", 40, 30).resize((96, 64), Image.Resampling.LANCZOS))
    assert torch.equal(trajectory(editor, source).latents[-1], expected)
