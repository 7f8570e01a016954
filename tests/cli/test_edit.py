"""Edits on the command line: of pictures, what a captioning model says of them, and of sessions, never lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
)

from fisedit import Editor
from fisedit.errors import ModelError
from fisedit.models.captioning import caption
from tests.support.folders import bomb
from tests.support.pictures import noise, scene
from tests.support.sessions import files

BEFORE, AFTER = "a cat and a cake on a beach", "a dog and a cake on a beach"
QUICK = ("--num-inference-steps", "2")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "[ENC]", "a", "cat", "dog", "on", "beach", "cake")


@pytest.fixture(scope="session")
def captioner(tmp_path_factory) -> Path:
    """A tiny random BLIP that knows a few words."""
    folder = tmp_path_factory.mktemp("blip")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "encoder_hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "bos_token_id": WORDS.index("[DEC]"),
        "sep_token_id": WORDS.index("[SEP]"),
        "eos_token_id": WORDS.index("[SEP]"),
        "pad_token_id": 0,
        "projection_dim": 16,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
        "projection_dim": 16,
    }
    torch.manual_seed(3)
    made = BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision, projection_dim=16))
    made.save_pretrained(folder)
    BlipProcessor(BlipImageProcessor(size={"height": 32, "width": 32}), tokenizer).save_pretrained(folder)
    return folder


class TestEdit:
    def test_a_picture_is_edited(self, process, model, tmp_path):
        picture = noise("RGBA", 90, 70)
        picture.save(tmp_path / "mine.png")
        before = (tmp_path / "mine.png").read_bytes()
        run = process(
            *("edit", "--picture", "mine.png", "--source-prompt", BEFORE, "--prompt", AFTER, "--model", model),
            *(*QUICK, "--output", "new.png", "--json"),
        )
        assert (run.status, run.err) == (0, "")
        told = json.loads(run.out)
        assert told["change"] == "cat -> dog" and told["notes"] == [] and told["parent"] == "0"
        new = Image.open(tmp_path / "new.png")
        assert (new.mode, new.size) == ("RGBA", (90, 70))
        assert np.array_equal(np.asarray(new)[..., 3], np.asarray(picture)[..., 3])
        assert (tmp_path / "mine.png").read_bytes() == before

    def test_a_picture_is_edited_by_stable_diffusion_xl(self, fisedit, pipelines, tmp_path):
        pipelines["sdxl"].save_pretrained(tmp_path / "xl")
        scene().save(tmp_path / "mine.png")
        mask = Image.fromarray(np.kron(np.eye(4, dtype=np.uint8) * 255, np.ones((32, 32), np.uint8)))
        mask.save(tmp_path / "mask.png")
        words = ("--source-prompt", BEFORE, "--prompt", AFTER, "--mask", "mask.png", "--output", "new.png", "--json")
        sizes = ("--sizes", "original-size=96,200", "--sizes", "crops_coords_top_left=0,8")
        run = fisedit("edit", "--picture", "mine.png", *words, "--model", "xl", *sizes, *QUICK)
        assert run.status == 0 and json.loads(run.out)["stats"]["unet_evaluations_sparse"]
        old, new = (np.asarray(Image.open(tmp_path / name).convert("RGB")) for name in ("mine.png", "new.png"))
        outside = np.asarray(mask) == 0
        assert np.array_equal(old[outside], new[outside]) and not np.array_equal(old, new)
        made = json.loads(fisedit("show", "new.png", "--json").out)
        assert made["fisedit"]["source"]["sizes"] == {"original_size": [96, 200], "crops_coords_top_left": [0, 8]}
        refused = fisedit("generate", BEFORE, *sizes, *QUICK)
        assert refused.status and "sizes are read by Stable Diffusion XL alone" in refused.err

    def test_without_a_caption(self, fisedit, model, tmp_path):
        scene().save(tmp_path / "mine.png")
        run = fisedit(*("edit", "--picture", "mine.png", "--prompt", "a dog", "--model", model, *QUICK, "--json"))
        assert json.loads(run.out)["change"] == "+ a dog"

    def test_a_session_of_it(self, fisedit, model, tmp_path):
        scene(100, 60).save(tmp_path / "mine.jpg")
        Image.fromarray(np.arange(100)[None].repeat(60, 0) < 38).save(tmp_path / "mask.png")
        begin = ("--picture", "mine.jpg", "--source-prompt", BEFORE, "--model", model, *QUICK, "--inversion", "ddpm")
        go_on = ("--session", "s", "--mask", "mask.png", "--output", "new.png", "--json")
        first = fisedit("edit", *begin, "--strength", "0.5", "--prompt", AFTER, *go_on)
        assert first.err == ""
        assert json.loads(first.out)["stats"]["steps_shared"] == 1
        after_one = np.asarray(Image.open(tmp_path / "new.png"))
        second = fisedit("edit", "--prompt", "a bird and a cake on a beach", *go_on)
        assert json.loads(second.out)["parent"] == json.loads(first.out)["id"]
        after_two, stored = (np.asarray(Image.open(tmp_path / name).convert("RGB")) for name in ("new.png", "mine.jpg"))
        assert (after_two[:, 38:] == stored[:, 38:]).all() and (after_two != after_one).any()
        fisedit("edit", *begin, "--prompt", AFTER, *go_on).refused("input", "s holds a session")

    def test_boxes_and_soft_masks_of_a_large_picture(self, fisedit, model, tmp_path):
        """The part around them is painted at full resolution, and everything else stays."""
        picture = noise("RGB", 500, 300)
        picture.save(tmp_path / "mine.png")
        grey = np.zeros((300, 500), np.uint8)
        grey[200:208, 332:340] = 128
        Image.fromarray(grey).save(tmp_path / "grey.png")
        where = ("--box", "300,200,308,208", "--box", "316,200,324,208", "--mask", "grey.png", "--soft")
        begin = ("--picture", "mine.png", "--source-prompt", BEFORE, "--model", model, *QUICK)
        run = fisedit("edit", *begin, *where, "--prompt", AFTER, "--output", "new.png", "--json")
        assert (run.status, run.err) == (0, "")
        new, old = (np.asarray(image) for image in (Image.open(tmp_path / "new.png"), picture))
        changed = (new != old).any(2)
        assert changed[200:208, 300:308].any() and changed[200:208, 316:324].any()
        inside = np.zeros_like(changed)
        inside[200:208, 300:308] = inside[200:208, 316:324] = inside[200:208, 332:340] = True
        assert not changed[~inside].any()

    def test_erasing(self, fisedit, model, tmp_path):
        scene(96, 64).save(tmp_path / "mine.png")
        begin = ("--picture", "mine.png", "--source-prompt", BEFORE, "--model", model, *QUICK)
        run = fisedit(
            "edit", *begin, "--erase", "--box", "0,0,30,30", "--session", "s", "--output", "new.png", "--json"
        )
        assert (run.status, run.err) == (0, "")
        told = json.loads(run.out)
        assert told["prompt"] == BEFORE and told["stats"]["mask_source"] == "given"
        new, old = (np.asarray(Image.open(tmp_path / name)) for name in ("new.png", "mine.png"))
        assert (new[:24, :24] != old[:24, :24]).any() and np.array_equal(new[40:], old[40:])
        again = fisedit("edit", "--session", "s", "--prompt", AFTER, "--box", "64,0,96,30", "--json")
        assert json.loads(again.out)["parent"] == told["id"]

    def test_regions_of_files(self, fisedit, model, tmp_path):
        scene(96, 64).save(tmp_path / "mine.png")
        left, right = {"box": [0, 0, 30, 30]}, {"minus": [{"box": [60, 0, 96, 64]}, {"mask": "masks/m.png"}]}
        (tmp_path / "masks").mkdir()
        lower = np.zeros((64, 96), np.uint8)
        lower[32:] = 255
        Image.fromarray(lower).save(tmp_path / "masks" / "m.png")
        (tmp_path / "one.json").write_text(json.dumps({"any": [left, right]}))
        (tmp_path / "both.json").write_text(
            json.dumps([{"region": left, "prompt": "a dog"}, {"region": right, "prompt": "a car"}])
        )
        begin = ("--picture", "mine.png", "--source-prompt", BEFORE, "--model", model, *QUICK, "--json")
        old = np.asarray(Image.open(tmp_path / "mine.png"))
        for options in (("--region", "one.json", "--prompt", AFTER), ("--regions", "both.json")):
            run = fisedit("edit", *begin, *options, "--output", "new.png")
            assert (run.status, run.err) == (0, "")
            changed = (np.asarray(Image.open(tmp_path / "new.png")) != old).any(2)
            assert changed[:30, :30].any() and changed[:30, 64:].any()
            assert not changed[34:].any() and not changed[:, 34:54].any()
        (tmp_path / "words.json").write_text('{"words": ["beach"]}')
        run = fisedit("edit", *begin, "--region", "words.json", "--prompt", AFTER)
        assert json.loads(run.out)["stats"]["mask_source"] == "attention"
        run = fisedit("edit", *begin, "--point", "20,20", "--point-outside", "90,60", "--prompt", AFTER)
        assert json.loads(run.out)["stats"]["mask_source"] in ("given", "everywhere")
        run = fisedit("edit", *begin, "--point", "96,20", "--prompt", AFTER)
        run.refused("mask", "a point must lie on the picture's 96x64 pixels")

    def test_extending(self, fisedit, model, tmp_path):
        scene(96, 64).save(tmp_path / "mine.png")
        begin = ("--picture", "mine.png", "--source-prompt", BEFORE, "--model", model, *QUICK)
        run = fisedit("edit", *begin, "--extend", "0,0,32,0", "--output", "new.png", "--json")
        assert (run.status, run.err) == (0, "")
        new, old = (np.asarray(Image.open(tmp_path / name)) for name in ("new.png", "mine.png"))
        assert new.shape == (64, 128, 3) and np.array_equal(new[:, :96], old)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ((), "give a --prompt"),
            (("--erase",), "--erase needs a --mask"),
            (("--erase", "--box", "0,0,8,8", "--strength", "0.5"), "--erase has no use for --strength"),
            (("--erase", "--regions", "both.json"), "--erase has no use for --regions"),
            (("--extend", "8,0,0,0", "--box", "0,0,8,8"), "--extend has no use for --box"),
            (("--extend", "8,0,0"), "--extend must be L,T,R,B"),
            (("--extend", "8,0,0,0.5"), "--extend must be L,T,R,B"),
            (("--regions", "both.json", "--grow", "1"), "--regions has no use for --grow"),
            (("--regions", "none.json"), "--regions must be a file of JSON"),
            (("--region", "broken.json", "--prompt", AFTER), "--region must be a file of JSON"),
            (("--region", "empty.json", "--prompt", AFTER), "a region must have one of"),
            (("--region", "lost.json", "--prompt", AFTER), "no such file"),
            (("--box", "0,0,8", "--prompt", AFTER), "--box must be L,T,R,B"),
            (("--soft", "--prompt", AFTER), "--soft is of a --mask"),
        ],
    )
    def test_regions_that_do_not_fit(self, fisedit, model, tmp_path, options, why):
        scene(96, 64).save(tmp_path / "mine.png")
        (tmp_path / "broken.json").write_text("{")
        (tmp_path / "empty.json").write_text("{}")
        (tmp_path / "lost.json").write_text('{"mask": "lost.png"}')
        (tmp_path / "both.json").write_text('[{"region": {"box": [0, 0, 8, 8]}, "prompt": "a dog"}]')
        begin = ("--picture", "mine.png", "--source-prompt", BEFORE, "--model", model, *QUICK)
        run = fisedit("edit", *begin, *options)
        assert run.status == 2 and why in run.err and run.err.count("\n") == 1
        assert not (tmp_path / "edit.png").exists()

    def test_a_preview_of_a_part_is_of_the_whole_picture(self, fisedit, model, tmp_path):
        photo = np.random.default_rng(0).integers(0, 255, (240, 320, 3), np.uint8)
        Image.fromarray(photo).save(tmp_path / "photo.png")
        where = ("--box", "190,100,230,130", "--preview", "--json")
        edit = ("edit", "--picture", "photo.png", "--source-prompt", BEFORE, "--prompt", AFTER, "--model", model)
        run = fisedit(*edit, *QUICK, *where, "--output", "seen.png")
        told, seen = json.loads(run.out), np.asarray(Image.open(tmp_path / "seen.png"))
        changed = (seen != photo).any(-1)
        assert seen.shape == photo.shape and told["nothing"] == told["fallback"] == ""
        assert told["area"] == pytest.approx(changed.mean(), abs=0.005) and changed.mean() < 0.06

    def test_a_preview(self, fisedit, model, tmp_path):
        scene(100, 60).save(tmp_path / "mine.png")
        run = fisedit(*("edit", "--picture", "mine.png", "--prompt", "a dog", "--model", model, *QUICK, "--preview"))
        assert run.status == 0 and Image.open(tmp_path / "edit.png").size == (100, 60)

    def test_of_an_animation_the_first_frame(self, fisedit, model, tmp_path):
        frames = [scene().transpose(Image.Transpose.ROTATE_90) if turn else scene() for turn in (False, True)]
        frames[0].save(tmp_path / "mine.webp", save_all=True, append_images=frames[1:], lossless=True)
        run = fisedit(
            *("edit", "--picture", "mine.webp", "--source-prompt", BEFORE, "--prompt", BEFORE, "--model", model),
            *(*QUICK, "--json"),
        )
        assert json.loads(run.out)["notes"] == ["animated: the first of 2 frames was edited"]
        assert np.array_equal(np.asarray(Image.open(tmp_path / "edit.png")), np.asarray(frames[0]))
        run = fisedit(*("edit", "--picture", "mine.webp", "--prompt", AFTER, "--model", model), *QUICK, "--preview")
        assert "note: animated: the first of 2 frames was edited" in run.out


def png() -> bytes:
    file = BytesIO()
    noise("RGB", 64, 64).save(file, "PNG")
    return file.getvalue()


BROKEN = {
    "missing": (None, "no such file"),
    "empty": (b"", "got an empty file"),
    "text": (b"a cat on a beach", "got something else"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "got something else"),
    "cut": (png()[:900], "got a damaged file"),
    "large": (bomb(12_000), "at most 64 million pixels, got 12000x12000"),
    "bomb": (bomb(100_000), "at most 64 million pixels, got many more"),
}


class TestRefused:
    """Before the model loads: the one named here does not exist."""

    @pytest.mark.parametrize("kind", BROKEN)
    def test_a_file_that_is_no_picture(self, fisedit, tmp_path, kind):
        content, why = BROKEN[kind]
        if content is not None:
            (tmp_path / "mine.png").write_bytes(content)
        fisedit("edit", "--picture", "mine.png", "--prompt", AFTER, "--model", "./nowhere").refused(
            "input", "picture mine.png" if content is not None else "got mine.png", why
        )

    def test_a_folder_is_no_picture(self, fisedit, tmp_path):
        (tmp_path / "photos").mkdir()
        edit = ("edit", "--picture", "photos", "--prompt", AFTER, "--model", "./nowhere")
        fisedit(*edit).refused("input", "picture must be an image file, got photos: a folder")

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (["--scheduler", "euler"], "leave --scheduler out"),
            (["--source-prompt", BEFORE, "--caption-model", "blip"], "give --source-prompt or --caption-model"),
            (["--output", "./mine.png"], "must not be an input"),
        ],
    )
    def test_what_a_picture_does_not_go_with(self, fisedit, tmp_path, options, why):
        scene().save(tmp_path / "mine.png")
        run = fisedit("edit", "--picture", "mine.png", "--prompt", AFTER, "--model", "./nowhere", *options)
        run.refused("input", why)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (("--detect", "boxes.json", "--trace", "./boxes.json"), "trace must not be an input"),
            (("--region", "r.json"), "output must not be an input"),
        ],
    )
    def test_an_output_that_is_read(self, fisedit, tmp_path, options, why):
        """Masks that a region's file names are inputs too."""
        scene().save(tmp_path / "mine.png")
        scene().save(tmp_path / "edit.png")
        (tmp_path / "boxes.json").write_text('{"images": [], "annotations": []}')
        (tmp_path / "r.json").write_text('{"any": [{"minus": [{"everywhere": true}, {"mask": "./edit.png"}]}]}')
        before = files(tmp_path)
        run = fisedit("edit", "--picture", "mine.png", "--prompt", AFTER, "--model", "./nowhere", *options)
        run.refused("input", why)
        (tmp_path / "several.json").write_text('[{"region": {"mask": "edit.png"}, "prompt": "a dog"}]')
        run = fisedit("edit", "--picture", "mine.png", "--regions", "several.json", "--model", "./nowhere")
        run.refused("input", "output must not be an input")
        assert files(tmp_path) == before | {"several.json": (tmp_path / "several.json").read_bytes()}

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (("--quality", "best"), "quality must be one of fast, balanced, close, got 'best'"),
            (("--strength", "1.5"), "strength must be in (0, 1], got 1.5"),
            (("--strength", "0.01"), "strength must leave a step of 25 to run, got 0.01"),
            (("--structure", "2"), "structure must be in [0, 1], got 2"),
            (("--edit-seed", "-1"), "seed must be a whole number"),
            (("--context", "9"), "--context must be in [0, 8], got 9"),
            (("--inversion", "none"), "inversion must be one of"),
            (("--adapter", "a", "--adapter-scale", "99"), "scale must be a number in [-10, 10], got 99"),
            (("--lora", "a", "--lora-scale", "99"), "scale must be a number in [-10, 10], got 99"),
            (("--lora-scale", "1"), "--lora-scale is of --lora, got none; give one, or leave it out"),
            (
                ("--lora", "a", *("--lora-scale", "1") * 2),
                "--lora-scale must be given once or as often as --lora, got 2",
            ),
            (("--adapter", "a", "--reference", "none.png"), "reference must be an image file, got none.png: no such"),
            (("--adapter", "a", "--control", "none.png"), "control must be an image file, got none.png: no such file"),
            (("--adapter", "a", "--control", "."), "control must be an image file, got .: a folder"),
            (("--mask", "."), "mask must be an image file, got .: a folder"),
            (("--adapter", "a", "--drive", "none.json"), "poses must be JSON or CSV, got none.json"),
            (("--detect", "./nowhere", "--threshold", "2"), "threshold must be in [0, 1], got 2"),
        ],
    )
    def test_values_out_of_range(self, fisedit, tmp_path, options, why):
        scene().save(tmp_path / "mine.png")
        run = fisedit("edit", "--picture", "mine.png", "--prompt", AFTER, "--model", "./nowhere", *options)
        run.refused("mask" if "--mask" in options else "input", why)
        if options[2:3] in (("--reference",), ("--drive",)):
            fisedit("generate", BEFORE, "--model", "./nowhere", *options).refused("input", why)

    def test_widths_out_of_range(self, fisedit, tmp_path):
        scene().save(tmp_path / "mine.png")
        begin = ("edit", "--picture", "mine.png", "--model", "./nowhere")
        for sides in ("0,0,0,0", "-8,0,0,0"):
            fisedit(*begin, f"--extend={sides}").refused("input", "a border must be pixels", "not all 0")

    @pytest.mark.parametrize(
        ("width", "options"),
        [(16_384, ("--prompt", AFTER)), (16_380, ("--extend", "0,0,8,0"))],
    )
    def test_a_picture_too_long_for_its_format(self, fisedit, tmp_path, width, options):
        Image.new("RGB", (width, 8)).save(tmp_path / "mine.png")
        run = fisedit("edit", "--picture", "mine.png", *options, "--model", "./nowhere", "--output", "new.webp")
        run.refused("input", "a .webp has at most 16383 pixels a side", "write a .png")

    @pytest.mark.parametrize("option", [("--inversion", "ddpm"), ("--caption-model", "blip"), ("--context", "1")])
    def test_what_goes_with_a_picture_alone(self, fisedit, option):
        edit = ("edit", "--source-prompt", BEFORE, "--prompt", AFTER, "--model", "./nowhere", *option)
        fisedit(*edit).refused("input", f"{option[0]} is for a --picture")

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (("--box", "0,0,8,8", "--mask-method", "cross"), "--mask-method is of what words find"),
            (("--region", "r.json", "--probe-steps", "1"), "--probe-steps is of what words find"),
            (("--erase", "--box", "0,0,8,8", "--no-verify"), "--erase has no use for --no-verify"),
            (("--extend", "8,0,0,0", "--no-verify"), "--extend has no use for --no-verify"),
            (("--preview", "--no-verify"), "--preview has no use for --no-verify"),
            (("--preview", "--structure", "1"), "--preview has no use for --structure"),
            (("--preview", "--profile"), "--preview has no use for --profile"),
            (("--preview", "--trace", "t.json"), "--preview has no use for --trace"),
            (("--preview", "--features", "--session", "s"), "--preview has no use for --features"),
        ],
    )
    def test_options_without_use(self, fisedit, tmp_path, options, why):
        scene().save(tmp_path / "mine.png")
        (tmp_path / "r.json").write_text('{"everywhere": true}')
        edit = ("edit", "--picture", "mine.png", "--prompt", AFTER, "--model", "./nowhere", *options)
        fisedit(*edit).refused("input", why, "leave it out")

    def test_a_picture_made_again_has_no_context(self, fisedit, tmp_path):
        scene().save(tmp_path / "mine.png")
        edit = ("edit", "--from", "mine.png", "--prompt", AFTER, "--model", "./nowhere", "--context", "1")
        fisedit(*edit).refused("input", "leave --context out")

    @pytest.mark.parametrize("option", ["--region", "--regions", "--drive"])
    @pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
    def test_what_has_no_end_is_not_read(self, fisedit, tmp_path, option, kind):
        scene().save(tmp_path / "mine.png")
        path = tmp_path / "given.json"
        {"pipe": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
        words = () if option == "--regions" else ("--prompt", AFTER)
        edit = ("edit", "--picture", "mine.png", *words, "--model", "./nowhere", option, "given.json")
        fisedit(*edit).refused("input", "must be a plain file, got given.json")

    def test_two_sources(self, fisedit):
        fisedit("edit", "--source-prompt", BEFORE, "--session", "s", "--prompt", AFTER).refused("input", "give one of")


class TestCaptions:
    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
    def test_it_is_what_the_model_generates(self, captioner, mode):
        """By the model's own class, step by step."""
        picture = noise(mode, 50, 40)
        blip = BlipForConditionalGeneration.from_pretrained(captioner).eval()
        processor = AutoProcessor.from_pretrained(captioner)
        pixels = processor(images=picture.convert("RGB"), return_tensors="pt").pixel_values
        with torch.no_grad():
            tokens = blip.generate(pixel_values=pixels, max_new_tokens=40, do_sample=False)
        said = processor.decode(tokens[0], skip_special_tokens=True)
        assert caption(picture, str(captioner), local_files_only=True) == " ".join(said.split())
        assert set(said.split()) <= set(WORDS) and said.strip()

    @pytest.mark.parametrize("part", [None, "text_config", "vision_config"])
    def test_kernels_that_it_names_are_not_fetched(self, captioner, tmp_path, part):
        folder = shutil.copytree(captioner, tmp_path / "blip")
        config = json.loads((folder / "config.json").read_text())
        (config[part] if part else config)["attn_implementation"] = "kernels-community/flash-attn3"
        (folder / "config.json").write_text(json.dumps(config))
        assert caption(scene(), str(folder), local_files_only=True) == caption(scene(), str(captioner))

    def test_the_command_line_tells_it(self, fisedit, model, captioner, tmp_path):
        scene().save(tmp_path / "mine.png")
        said = caption(scene(), str(captioner), local_files_only=True)
        options = ("--caption-model", captioner, "--model", model, *QUICK, "--session", "s")
        run = fisedit("edit", "--picture", "mine.png", "--prompt", AFTER, *options, "--json")
        assert json.loads(run.out)["notes"] == [f'taken for "{said}"']
        assert json.loads((tmp_path / "s/session.json").read_text())["results"][0]["recipe"]["prompt"] == said

    @pytest.mark.parametrize("content", [None, {}, {"config.json": "{}"}, {"config.json": '{"model_type": "clip"}'}])
    def test_no_such_model(self, tmp_path, content):
        folder = tmp_path / "blip"
        if content is not None:
            folder.mkdir()
            for name, text in content.items():
                (folder / name).write_text(text)
        with pytest.raises(ModelError, match="caption model must be an image-to-text model") as caught:
            caption(scene(), str(folder), local_files_only=True)
        assert "\n" not in str(caught.value)

    def test_a_model_that_wants_words_is_refused(self, captioner, monkeypatch):
        def asked(*_: object, **__: object) -> None:
            raise ValueError("Image features and image tokens do not match")

        monkeypatch.setattr(BlipForConditionalGeneration, "generate", asked)
        with pytest.raises(ModelError, match="caption model must tell of a picture without being asked"):
            caption(scene(), str(captioner), local_files_only=True)

    def test_pickled_weights_are_refused(self, captioner, tmp_path):
        for path in captioner.iterdir():
            if path.suffix != ".safetensors":
                (tmp_path / path.name).write_bytes(path.read_bytes())
        blip = BlipForConditionalGeneration.from_pretrained(captioner)
        torch.save(blip.state_dict(), tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelError, match="caption model must be"):
            caption(scene(), str(tmp_path), local_files_only=True)


SMALL = ("--num-inference-steps", "2", "--width", "64", "--height", "64")
HOLDING = """
import sys, time
from pathlib import Path
from fisedit.sessions.folder import lock
with lock(Path("s")):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(fisedit, model, tmp_path):
    """The files of a session of two results in the folder `s`."""
    generate = ("generate", BEFORE, "--model", model, *SMALL, "--session", "s", "--output", "cat.png")
    assert fisedit(*generate).status == 0
    assert fisedit("edit", "--session", "s", "--prompt", AFTER, "--output", "dog.png").status == 0
    return files(tmp_path / "s")


@pytest.mark.slow
def test_a_new_source_does_not_replace_a_session(fisedit, model, tmp_path, held):
    """The model is a place that is none: the refusal comes before it is looked for."""
    generate = ("generate", AFTER, *SMALL, "--session", "s", "--output", "new.png")
    fisedit(*generate, "--model", "./nowhere").refused("session", "s holds a session", "--overwrite")
    assert files(tmp_path / "s") == held and not (tmp_path / "new.png").exists()
    (tmp_path / "s" / "notes.txt").write_text("mine")
    assert fisedit(*generate, "--model", model, "--overwrite").status == 0
    left = files(tmp_path / "s")
    assert len(json.loads(left["session.json"])["results"]) == 1
    assert len(left) == 4 and left["notes.txt"] == b"mine"


def test_no_picture_is_written_into_a_session(fisedit, tmp_path, held):
    edit = ("edit", "--session", "s", "--prompt", AFTER)
    own = next(name for name in held if name.startswith("0-") and name.count(".") == 1)
    for name in (own, "0.png", "new.jpg"):
        fisedit(*edit, "--output", f"s/{name}").refused("input", "session's folder")
    (tmp_path / "link").symlink_to("s")
    fisedit(*edit, "--output", "link/0.png").refused("input", "session's folder")
    new = ("generate", BEFORE, *SMALL, "--session", "other", "--model", "./nowhere")
    fisedit(*new, "--output", "other/source.png").refused("input", "session's folder")
    fisedit("demo", "--output", "s").refused("input", "session's folder")
    fisedit(*edit, "--trace", "s/trace.json").refused("input", "session's folder")
    (tmp_path / "region.json").write_text('{"everywhere": true}')
    fisedit(*edit, "--region", "region.json", "--trace", "region.json").refused("input", "trace must not be an input")
    assert (tmp_path / "region.json").read_text() == '{"everywhere": true}'
    fisedit(*new, "--trace", "other").refused("input", "trace")
    fisedit(*new, "--trace", "other.json", "--session", "other.json").refused("input", "session's folder")
    fisedit(*new, "--trace", "session.json").refused("input", "session's index")
    (tmp_path / "in").mkdir()
    fisedit("batch", "in", "s", "--prompt", AFTER).refused("input")
    assert files(tmp_path / "s") == held


def test_two_runs_do_not_edit_one_session_at_once(fisedit, tmp_path, held):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"held\n"
        edit = ("edit", "--session", "s", "--prompt", BEFORE, "--output", "again.png")
        fisedit(*edit).refused("session", "another run is working on the session in s")
        other.stdin.close()
        assert other.wait(60) == 0
    assert files(tmp_path / "s") == held and not (tmp_path / "again.png").exists()
    assert fisedit(*edit).status == 0


@pytest.mark.slow
def test_an_edit_is_in_its_file_where_its_session_cannot_be_saved(fisedit, tmp_path, held, monkeypatch):
    """Another run that needs no lock, such as an app, saves while an edit runs."""
    saving = Editor.save

    def save(editor, folder, **options):
        other = Editor.resume(folder, device="cpu")
        other.edit("a fox and a cake on a beach")
        saving(other, folder)
        saving(editor, folder, **options)

    monkeypatch.setattr(Editor, "save", save)
    fisedit("edit", "--session", "s", "--prompt", BEFORE, "--output", "new.png").refused("session", "another run")
    assert (tmp_path / "new.png").exists()
    monkeypatch.undo()
    assert [result.prompt for result in Editor.resume(tmp_path / "s", device="cpu").history][-1].startswith("a fox")
