"""`fisedit drive`: a clip of poses, whose frames are the source outside one region; stopped runs go on."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import save_file

from fisedit import Drive, Editor, Region
from fisedit.adapters.hellomeme.drive_networks import DriveNetwork
from fisedit.clips import frames, render
from fisedit.clips.drives import MAX_FRAMES, read_drives
from fisedit.errors import AdapterError, Cancelled, InputError, MaskError
from tests.support.adapters import filled
from tests.support.inpainting import inpainting
from tests.support.motion import reader_of

CAT = "a cat and a cake on a beach"
POSES = "pitch, yaw,roll,x,y,scale,jawOpen\n0,0,0,0,0,0.4,0\n0,25,0,0,0,0.4,0.5\n0,25,20,0.1,0,0.4,1\n"
BOX = ("--box", "16,16,80,80")
OUTSIDE = np.ones((128, 128), bool)
OUTSIDE[16:80, 16:80] = False


@pytest.fixture(scope="session")
def control(tmp_path_factory, pipelines) -> Path:
    """A control network for the tiny model, with weights by a recipe."""
    unet, folder = pipelines["demo"].unet, tmp_path_factory.mktemp("control")
    channels = [block.resnets[-1].out_channels for block in unet.down_blocks if block.downsamplers]
    network = filled(DriveNetwork((16, *channels), 32, points=[f"down_{i}" for i in range(len(channels))]))
    save_file(network.state_dict(), folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text('{"_class_name": "HMControlNet"}')
    return folder


@pytest.fixture
def driven(fisedit, model, control, tmp_path):
    """Runs `fisedit drive` on a picture that says how it was made, with three poses."""
    fisedit("generate", CAT, "--model", model, "--num-inference-steps", "2", "--width", "128", "--height", "128")
    (tmp_path / "poses.csv").write_text(POSES)

    def run(*arguments: object, poses: str = "poses.csv"):
        return fisedit("drive", "source.png", poses, "--adapter", control, "--model", model, *arguments)

    return run


def frames_of(path):
    with Image.open(path) as clip:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(clip)]


@pytest.mark.parametrize("ending", ["webp", "png"])
def test_every_frame_is_the_source_outside_the_region(driven, tmp_path, ending):
    told = driven(*BOX, "--output", f"clip.{ending}", "--fps", "8", "--json")
    assert (told.status, told.err) == (0, "")
    said, frames = json.loads(told.out), frames_of(tmp_path / f"clip.{ending}")
    assert said["frames"] == said["rendered"] == len(frames) == 3 and said["frames_per_second"] > 0
    assert said["area"] == pytest.approx(0.25)
    still = np.asarray(Image.open(tmp_path / "source.png").convert("RGB"))
    assert all((frame[OUTSIDE] == still[OUTSIDE]).all() for frame in frames)
    assert len({frame.tobytes() for frame in frames}) == 3
    with Image.open(tmp_path / f"clip.{ending}") as clip:
        clip.seek(1)
        clip.load()
        assert clip.info["duration"] == 125
    assert not (tmp_path / f"clip.{ending}.frames").exists()


def test_a_palette_is_said(driven, tmp_path):
    told = driven(*BOX, "--output", "clip.gif")
    assert told.status == 0 and "note: gif has 256 colours" in told.out and "Written: clip.gif" in told.out
    assert len(frames_of(tmp_path / "clip.gif")) == 3


def test_a_picture_of_another_program_and_words_that_say_where(driven, tmp_path):
    Image.fromarray(np.full((128, 128, 3), 90, np.uint8)).save(tmp_path / "source.png")
    told = driven("--word", "cat", "--source-prompt", CAT, "--num-inference-steps", "2", "--json")
    assert (told.status, told.err) == (0, "")
    assert json.loads(told.out)["rendered"] == 3 and len(frames_of(tmp_path / "clip.webp")) == 3


def test_a_picture_of_a_web_ui_says_what_it_shows(driven, tmp_path):
    texts = PngInfo()
    texts.add_text("parameters", f"{CAT}\nSteps: 2, Sampler: DDIM, CFG scale: 4, Seed: 7, Size: 128x128")
    Image.fromarray(np.full((128, 128, 3), 90, np.uint8)).save(tmp_path / "source.png", pnginfo=texts)
    told = driven("--word", "cat", "--json")
    assert told.status == 0 and json.loads(told.out)["rendered"] == 3


def test_a_run_that_was_stopped_goes_on(pipelines, control, tmp_path):
    editor, drives = Editor(pipelines["demo"], model="demo"), read_drives(poses(tmp_path))
    editor.load_adapter(control)
    source = editor.generate(CAT, num_inference_steps=2)
    where, path = Region.box(16, 16, 64, 64), tmp_path / "clip.webp"

    def stop(i, n, _):
        if i >= 4:  # in the third frame
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        render.render_frames(editor, drives, where, path, on_step=stop)
    assert len(list((tmp_path / "clip.webp.frames").iterdir())) == 2 and editor.current is source
    counted = []
    frames = render.render_frames(editor, drives, where, path, on_step=lambda i, n, _: counted.append((i, n)))
    assert frames.rendered == 1 and counted == [(4, 6), (5, 6)] and len(editor.history) == 1
    again = render.render_frames(editor, drives, where, tmp_path / "whole.webp")
    assert [a.read_bytes() for a in frames.paths] == [b.read_bytes() for b in again.paths]
    assert (
        render.render_frames(editor, drives, where, path, quality="fast").rendered == 3
    )  # other settings, other frames
    unfinished, own = frames.folder / f".{frames.paths[0].stem}-ab_1.part", frames.folder / "notes.png"
    unfinished.touch()
    own.touch()
    render.write_clip(frames, path)
    assert len(frames_of(path)) == 3 and list(frames.folder.iterdir()) == [own]  # none of other settings


def poses(folder, text=POSES, name="poses.csv"):
    (folder / name).write_text(text)
    return folder / name


def test_poses_of_trackers(tmp_path):
    read = read_drives(poses(tmp_path))
    assert read[1] == Drive((0, 25, 0, 0, 0, 0.4), {"jawOpen": 0.5}) and len(read) == 3
    one = poses(tmp_path, json.dumps(read[2].as_dict()), "one.json")
    several = poses(tmp_path, json.dumps([each.as_dict() for each in read]), "several.json")
    assert read_drives(one) == (read[2],) and read_drives(several) == read
    assert read_drives(poses(tmp_path, "yaw\n5\n"))[0] == Drive((0, 5, 0, 0, 0, 0.4))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("yaw\n5\nfar\n", "p.csv", "line 3 of the poses: a drive's pose must be 6 numbers"),
        ("yaw,nod\n5,1\n", "p.csv", "line 2 of the poses: no coefficient of an expression is named 'nod'"),
        ("yaw,roll\n5\n", "p.csv", "line 2 of the poses: it has more or fewer fields"),
        ("yaw\n", "p.csv", "poses must be 1 to"),
        ("yaw\n" + "1\n" * (MAX_FRAMES + 1), "p.csv", "poses must be 1 to"),
        ("[{}]", "p.json", "drive 1 of the poses: a drive must be a JSON object"),
        ("{", "p.json", "poses must be JSON or CSV"),
        ("", "p.txt", "poses must be a .json or .csv file"),
    ],
)
def test_poses_that_are_none(tmp_path, text, name, message):
    with pytest.raises(InputError) as refused:
        read_drives(poses(tmp_path, text, name))
    assert message in str(refused.value)


def test_bad_options_are_one_line_before_any_work(driven, fisedit, tmp_path, monkeypatch):
    driven().refused("input", "give a --mask, --box, --point, --word or --region, got none; it says what moves")
    driven(*BOX, "--output", "clip.avi").refused("input", "a clip must end in .webp, .png, .gif, .mp4")
    driven(*BOX, "--fps", "0").refused("input", "frames per second must be 0.1 to 60 in .webp, got 0")
    driven(*BOX, "--fps", "60", "--output", "c.gif").refused("input", "frames per second must be 0.1 to 50 in .gif")
    driven(*BOX, "--soft").refused("input", "--soft is of a --mask, got none")
    driven(*BOX, "--instance", "0").refused("input", "--instance is of what words find")
    (tmp_path / "c.webp.frames").write_text("")
    driven(*BOX, "--output", "c.webp").refused("input", "frames are kept in the folder c.webp.frames, got a file")
    (tmp_path / "c.webp.frames").unlink()
    driven(*BOX, "--output", "source.png").refused("input", "output must not be an input")
    (tmp_path / "r.json").write_text('{"mask": "clip.webp"}')
    driven("--region", "r.json").refused("input", "output must not be an input, got clip.webp")
    (tmp_path / "r.json").unlink()
    driven(*BOX, poses="none.csv").refused("input", "poses must be JSON or CSV, got none.csv")
    monkeypatch.setattr(Editor, "from_pretrained", None)
    driven(*BOX, "--quality", "best").refused("input", "quality must be one of fast, balanced, close, got 'best'")
    driven(*BOX, "--num-inference-steps", "0").refused("input", "num_inference_steps must be")
    driven(*BOX, "--adapter-scale", "99").refused("input", "scale must be a number in [-10, 10], got 99")
    fisedit("drive", "source.png", "poses.csv", *BOX).refused("input", "give an --adapter that reads poses")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["poses.csv", "source.png"]


def test_mp4_needs_ffmpeg(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"needs the program ffmpeg, .*; install it, or write clip\.webp"):
        render.check_clip_path(tmp_path / "clip.mp4", 12)


def test_mp4_by_ffmpeg(monkeypatch, tmp_path):
    """A program of that name gets the frames as PNGs, and its output is the clip; its error is one line."""
    program = tmp_path / "ffmpeg"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *"-framerate 12 "*) /bin/cat ;; *) echo "bad rate" >&2; exit 1 ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "clip.mp4.frames"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    Image.fromarray(noise).save(folder / "0.png")  # more than a pipe holds
    frames, path = (
        render.ClipFrames(folder, [folder / "0.png"], 1, 1.0, 0.5),
        render.check_clip_path(tmp_path / "clip.mp4", 12),
    )
    with pytest.raises(InputError, match=r"ffmpeg could not write the clip \(bad rate\); write a .webp instead"):
        render.write_clip(frames, path, frames_per_second=24)
    assert not path.exists() and (folder / "0.png").exists()
    assert "mp4 is not exact" in render.write_clip(frames, path)[0]
    assert path.read_bytes().startswith(b"\x89PNG") and not folder.exists()


def test_one_pose_for_one_edit(fisedit, model, control, tmp_path):
    given = ("--adapter", control, "--drive", "poses.csv")
    poses(tmp_path, "yaw\n30\n")
    begin = ("--model", model, "--num-inference-steps", "2", "--session", "s")
    assert fisedit("generate", CAT, *begin, *given, "--json").status == 0
    poses(tmp_path, "yaw\n-30\n")
    run = fisedit("edit", "--session", "s", "--prompt", "a dog and a cake on a beach", "--drive", "poses.csv", "--json")
    assert (run.status, run.err) == (0, "")
    results = json.loads((tmp_path / "s/session.json").read_text())["results"]
    assert [each["recipe"]["like"][0]["drive"]["pose"][1] for each in results] == [30, -30]
    poses(tmp_path)
    begin = ("--source-prompt", CAT, "--model", model, *given)
    fisedit("edit", *begin, "--prompt", "a dog").refused("input", "--drive must hold one pose, got 3")
    fisedit("edit", *begin, "--erase", *BOX).refused("input", "--erase has no use for --drive")


@pytest.fixture
def editor(pipelines, control):
    editor = Editor(pipelines["demo"], model="demo")
    editor.load_adapter(control)
    return editor


def test_a_source_that_has_the_first_drive_moves(editor, tmp_path):
    drives = read_drives(poses(tmp_path))
    source = editor.generate(CAT, num_inference_steps=2, drive=drives[0])
    frames = render.render_frames(editor, drives, Region.box(16, 16, 64, 64), tmp_path / "c.webp")
    shown = [np.asarray(Image.open(path)) for path in frames.paths]
    assert frames.area > 0 and (shown[0] == np.asarray(source.image)).all() and (shown[1] != shown[0]).any()
    with pytest.raises(MaskError, match="marks nothing"):
        render.render_frames(
            editor, drives, Region.box(16, 16, 64, 64) & Region.box(80, 80, 99, 99), tmp_path / "d.webp"
        )


def test_a_soft_mask_stays_soft(editor, tmp_path):
    grey = Image.fromarray(
        np.kron(np.arange(0, 256, 16, dtype=np.uint8)[None].repeat(16, 0), np.ones((8, 8), np.uint8))
    )
    drives, region = read_drives(poses(tmp_path))[1:2], Region.mask(grey, soft=True)
    source = editor.generate(CAT, num_inference_steps=4)
    frames = render.render_frames(editor, drives, region, tmp_path / "c.webp")
    expected = editor.edit(CAT, region=region, drive=drives[0], verify=False)
    assert (np.asarray(Image.open(frames.paths[0])) == np.asarray(expected.image)).all()
    editor.checkout(source.id)
    hard = editor.edit(CAT, mask=expected.mask.grid, drive=drives[0])
    assert (np.asarray(hard.image) != np.asarray(expected.image)).any()


def test_a_soft_mask_of_an_opened_part_stays_where_it_is(editor, tmp_path):
    levels = np.zeros((240, 320), np.uint8)
    levels[100:130, 190:230] = 120
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (240, 320, 3), np.uint8))
    region = Region.mask(Image.fromarray(levels), soft=True)
    source = editor.open(photo, CAT, num_inference_steps=4, region=region)
    assert source.config.crop
    (path,) = render.render_frames(editor, read_drives(poses(tmp_path))[1:2], region, tmp_path / "c.webp").paths
    changed = (np.asarray(Image.open(path)) != np.asarray(photo)).any(-1)
    assert changed.any() and not changed[:80].any() and not changed[150:].any() and not changed[:, :170].any()


def test_frames_of_other_loras_are_other_frames(editor, tmp_path, monkeypatch):
    drives, box = read_drives(poses(tmp_path))[1:2], Region.box(16, 16, 64, 64)
    editor.generate(CAT, num_inference_steps=2)
    first = render.render_frames(editor, drives, box, tmp_path / "c.webp")
    assert render.render_frames(editor, drives, box, tmp_path / "c.webp").paths == first.paths
    monkeypatch.setattr(render, "loras", lambda *models: (("style", 0.5),))
    assert render.render_frames(editor, drives, box, tmp_path / "c.webp").paths != first.paths


def test_redo_is_as_before_frames(editor, tmp_path):
    editor.generate(CAT, num_inference_steps=2)
    edited = editor.edit("a dog and a cake on a beach", region=Region.box(16, 16, 64, 64))
    editor.undo()
    render.render_frames(editor, read_drives(poses(tmp_path))[:2], Region.box(16, 16, 64, 64), tmp_path / "c.webp")
    assert editor.redo() is edited


def test_what_a_clip_cannot_hold(editor, tmp_path):
    """Transparency stays in WebP and PNG; 16-bit levels and profiles become what a screen shows, and that is said."""
    levels = np.random.default_rng(0).integers(0, 255, (128, 128, 4), np.uint8)
    levels[..., 3] = np.maximum(levels[..., 3], 1)  # what is wholly clear has no colour in an animated WebP
    drives, box = read_drives(poses(tmp_path))[:2], Region.box(16, 16, 64, 64)
    editor.open(Image.fromarray(levels), CAT, num_inference_steps=2)
    frames = render.render_frames(editor, drives, box, tmp_path / "c.webp")
    assert frames.notes == () and render.write_clip(frames, tmp_path / "c.webp") == ()
    with Image.open(tmp_path / "c.webp") as clip:
        shown = np.asarray(clip.convert("RGBA"))
    outside = np.ones((128, 128), bool)
    outside[16:64, 16:64] = False
    assert (shown[outside] == levels[outside]).all()
    assert "no transparency" in render.render_frames(editor, drives, box, tmp_path / "c.gif").notes[0]
    grey = np.random.default_rng(0).integers(0, 65535, (128, 128), np.uint16)
    editor.open(Image.fromarray(grey), CAT, num_inference_steps=2)
    frames = render.render_frames(editor, drives, box, tmp_path / "d.png")
    assert "8-bit sRGB" in frames.notes[0]
    shown = np.asarray(Image.open(frames.paths[0]))
    assert np.abs(shown[outside].astype(int)[:, 0] - grey[outside] / 257).max() <= 1


def test_a_frame_that_cannot_be_kept_leaves_the_editor_as_it_was(editor, tmp_path, monkeypatch):
    source = editor.generate(CAT, num_inference_steps=2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(render, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        render.render_frames(editor, read_drives(poses(tmp_path)), Region.box(16, 16, 64, 64), tmp_path / "c.webp")
    assert editor.current is source and len(editor.history) == 1
    with pytest.raises(InputError, match="a clip needs a drive for every frame, got none"):
        render.render_frames(editor, [], Region.box(16, 16, 64, 64), tmp_path / "c.webp")


def test_one_run_renders_a_clip(tmp_path):
    path = tmp_path / "c.webp"
    with render.rendering(path):
        lines = (
            "from pathlib import Path",
            "from fisedit.clips.render import rendering",
            f"with rendering(Path({str(path)!r})): ...",
        )
        command = [sys.executable, "-c", "\n".join(lines)]
        told = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2)]
    assert all(each.returncode == 1 and "another run renders" in each.stderr for each in told)
    assert not (tmp_path / "c.webp.frames").exists()
    with render.rendering(path):
        pass


def test_clips_are_as_fast_as_asked_for():
    for rate in (50, 24, 12, 7, 0.1):
        assert sum(render._delays(700, rate, 10)) == pytest.approx(700_000 / rate, abs=10)
    assert render._delays(3, 12, 1) == [83, 84, 83]


def test_too_much_for_memory_is_refused_before_work(editor, tmp_path, monkeypatch):
    editor.generate(CAT, num_inference_steps=2)
    monkeypatch.setattr(render, "_MAX_PIXELS", 128 * 128 * 2)
    with pytest.raises(InputError, match="got 3 frames of 128x128; make it smaller"):
        render.render_frames(editor, read_drives(poses(tmp_path)), Region.box(16, 16, 64, 64), tmp_path / "c.png")


def test_a_plain_picture_needs_words(fisedit, model, control, tmp_path):
    Image.new("RGB", (128, 128)).save(tmp_path / "plain.png")
    poses(tmp_path)
    run = fisedit("drive", "plain.png", "poses.csv", *BOX, "--adapter", control, "--model", model)
    run.refused("input", "the picture says nothing of how it was made; say with --source-prompt what it shows")


@pytest.fixture(scope="session")
def motion(tmp_path_factory, pipelines) -> dict[str, Path]:
    """Motion modules for the tiny model by family, with weights by a recipe."""
    unet, folders = pipelines["demo"].unet, {}
    for family in ("v3", "animatediff"):
        reader, adapter = reader_of(unet, family)
        folders[family] = tmp_path_factory.mktemp(family)
        if adapter is not None:
            adapter.save_pretrained(folders[family])
            continue
        names = {point: f"motion_{point.replace('_', '.')}" for point in reader.modules}
        tensors = {f"{names[p]}.{n}": t for p, module in reader.modules.items() for n, t in module.state_dict().items()}
        save_file(tensors, folders[family] / "diffusion_pytorch_model.safetensors")
        kind = {"_class_name": "HM3MotionAdapter", "num_attention_heads": 4}
        (folders[family] / "config.json").write_text(json.dumps(kind))
    return folders


@pytest.mark.parametrize("family", ["v3", "animatediff"])
def test_motion_modules_let_frames_attend_to_one_another(driven, motion, tmp_path, family):
    for name, more in (("alone", ()), ("together", ("--adapter", motion[family]))):
        told = driven(*BOX, *more, "--output", f"{name}.webp", "--json")
        assert (told.status, told.err) == (0, "") and json.loads(told.out)["rendered"] == 3
    still = np.asarray(Image.open(tmp_path / "source.png").convert("RGB"))
    alone, together = (frames_of(tmp_path / f"{name}.webp") for name in ("alone", "together"))
    assert all((frame[OUTSIDE] == still[OUTSIDE]).all() for frame in together)
    assert all((a != b)[~OUTSIDE].any() for a, b in zip(alone, together, strict=True))
    (tmp_path / "others.csv").write_text(POSES.replace("0,25,20,0.1", "0,-25,20,0.1"))
    driven(*BOX, "--adapter", motion[family], "--output", "others.webp", poses="others.csv")
    others = frames_of(tmp_path / "others.webp")
    assert (others[0] != together[0]).any() and (others[0][OUTSIDE] == still[OUTSIDE]).all()


def test_a_stopped_clip_of_several_windows_goes_on(pipelines, control, motion, tmp_path, monkeypatch):
    """Windows of three share a frame; the third of five frames is in both."""
    monkeypatch.setattr(frames, "WINDOW", 3)
    editor = Editor(pipelines["demo"], model="demo")
    editor.load_adapter(control)
    editor.load_adapter(motion["v3"])
    drives = [Drive((0, 10 * i, 0, 0, 0, 0.4)) for i in range(5)]
    source, where = editor.generate(CAT, num_inference_steps=2), Region.box(16, 16, 64, 64)
    path = tmp_path / "clip.webp"

    def stop(i, n, _):
        assert n == 4
        if i >= 2:  # in the second window
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        render.render_frames(editor, drives, where, path, on_step=stop)
    assert len(list((tmp_path / "clip.webp.frames").iterdir())) == 2
    assert editor.current is source and len(editor.history) == 1
    made = render.render_frames(editor, drives, where, path)
    assert made.rendered == 3 and len(made.paths) == 5
    again = render.render_frames(editor, drives, where, tmp_path / "whole.webp")
    assert [a.read_bytes() for a in made.paths] == [b.read_bytes() for b in again.paths]


@pytest.mark.parametrize("count", [1, 2, 12, 13, 23, 24, 100])
def test_windows_cover_a_clip_once_and_share_a_frame(count):
    found = frames.windows(count)
    assert [i for window in found for i in window.kept] == list(range(count))
    assert all(window.last - window.first < frames.WINDOW for window in found)
    assert all(a.last == b.first for a, b in itertools.pairwise(found)) and len(found) == max(1, -(-(count - 1) // 11))


def test_frames_need_motion_modules(pipelines, control):
    editor = Editor(pipelines["demo"], model="demo")
    editor.load_adapter(control)
    editor.generate(CAT, num_inference_steps=2)
    with pytest.raises(AdapterError, match=r"^frames attend to one another by motion modules, got none"):
        editor.edit_frames(CAT, [Drive()], Region.box(16, 16, 64, 64))


def clip_editor(pipe, control, motion):
    """An editor with a source, on which frames attend to one another."""
    editor = Editor(pipe, model="demo")
    editor.load_adapter(control)
    editor.load_adapter(motion["animatediff"])
    editor.generate(CAT, num_inference_steps=2)
    return editor


def test_frames_of_an_inpainting_model(pipelines, control, motion):
    editor = clip_editor(inpainting(pipelines["demo"]), control, motion)
    drives = [Drive((0, 20 * i, 0, 0, 0, 0.4)) for i in range(2)]
    first, second = map(np.asarray, editor.edit_frames(CAT, drives, Region.box(16, 16, 64, 64)))
    still = np.asarray(editor.current.image)
    assert all((frame[OUTSIDE] == still[OUTSIDE]).all() for frame in (first, second)) and (first != second).any()


def test_frames_need_drives_and_a_part_of_the_picture(pipelines, control, motion):
    editor = clip_editor(pipelines["demo"], control, motion)
    nothing = Region.box(16, 16, 64, 64) & Region.box(80, 80, 99, 99)
    with pytest.raises(InputError, match=r"^drives must be one for every frame, got none"):
        editor.edit_frames(CAT, [], Region.box(16, 16, 64, 64))
    with pytest.raises(MaskError, match=r"^the region of frames must be a part of the picture: nothing is left"):
        editor.edit_frames(CAT, [Drive()], nothing)
    with pytest.raises(MaskError, match=r"^the region of frames must be a part of the picture: .*watercolor.*; give"):
        editor.edit_frames(f"{CAT}, watercolor painting", [Drive()], Region.words())
    assert len(editor.history) == 1


def test_motion_modules_are_for_clips(fisedit, model, motion):
    told = fisedit("generate", CAT, "--model", model, "--adapter", motion["v3"])
    told.refused("input", f"motion modules are for clips, got {motion['v3']} as an --adapter; see fisedit drive")
