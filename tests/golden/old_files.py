"""Files written by commit 7d06e12, and what must be found in them: `python -m tests.golden.old_files` writes them.

They are fixtures of the file formats of version 0.1.0 and are never made anew: a later version writes a folder of its
own. All was written through the public face alone, with paths relative to the folder, so that none is told in a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from PIL import Image

from fisedit import Editor
from tests.golden.cases import CASTLE, CAT, DOG, RECIPE, SOURCE, box, cells, load, picture
from tests.golden.outcome import STATS, machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fisedit import EditResult

FILES = Path(__file__).parents[1] / "fixtures" / "v0.1.0"
INDEX = FILES / "expected.json"
ROOT = Path(__file__).parents[2]
PLACE = ("--model", "demo", "--device", "cpu", "--dtype", "fp32", "--local-files-only")
STEPS = ("--num-inference-steps", "6", "--guidance-scale", "4")
WORDS = ("--prompt", "{source} and a tent", "--captions", "captions.csv", "--masks", "masks")
JOBS = {
    "finished": ("batch", "in", "finished", *WORDS, *STEPS, *PLACE, "--workers", "0"),
    "interrupted": ("batch", "in", "interrupted", *WORDS, *STEPS, *PLACE, "--workers", "0"),
    "rows": ("batch", "in", "rows", "--edits", "edits.jsonl", "--masks", "masks", *STEPS, *PLACE, "--workers", "0"),
}
"""Output folder -> the command line, run in the folder `batch`, that wrote it."""

JOURNAL = ".fisedit-batch.jsonl"
FOX = "a fox and a cake on a beach"
FURTHER = {"generated": "a robot and a cake on a beach", "opened": "a rabbit and a cake on a beach", "look": FOX}
"""Session -> the prompt of one more edit of where it was left."""

ENDINGS = ("png", "jpg", "webp", "tif")


def environment() -> dict[str, str]:
    """One thread, no network, this checkout's package, no choice of kernels."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    free = {key: value for key, value in os.environ.items() if key not in ("FISEDIT_GRAPHS", "FISEDIT_KERNELS")}
    return free | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder."""
    command = [sys.executable, "-m", "fisedit", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )


def pixels(image: Image.Image) -> dict[str, Any]:
    """What tells a picture's pixels from all others."""
    digest = hashlib.sha256(image.tobytes()).hexdigest()
    return {"mode": image.mode, "size": list(image.size), "sha256": digest}


NEWER = ("clip_skip", "textual_inversions", "crop", "negative_clip_skip")
"""Settings that version 0.1.0 did not know, which are left out where they are empty."""


def told_of_result(result: EditResult) -> dict[str, Any]:
    """All that a session keeps of a result, JSON-ready."""
    stats = result.stats.as_dict()
    grid = np.ascontiguousarray(result.mask.grid, np.uint8)
    recipe = asdict(result.recipe) | {"like": [one.as_dict() for one in result.recipe.like]}
    told = {
        "id": result.id,
        "parent": result.parent,
        "prompt": result.prompt,
        "recipe": {name: value for name, value in recipe.items() if value or name not in NEWER},
        "change": str(result.diff),
        "picture": pixels(result.image),
        "canvas": pixels(result.canvas),
        "mask": {"source": result.mask.source, "confidence": result.mask.confidence, "cells": int(grid.sum())},
        "mask_sha256": hashlib.sha256(grid.tobytes()).hexdigest(),
        "growth": result.run.growth,
        "structure": result.run.structure,
        "start": result.run.start,
        "checked": result.run.checked,
        "stats": {name: stats[name] for name in STATS},
    }
    return dict(json.loads(json.dumps(told)))


def told_of_session(editor: Editor) -> dict[str, Any]:
    """Every result of an editor, and where it stands."""
    return {
        "model": editor.model,
        "current": editor.current.id,
        "later": editor.history.redo_id,
        "results": [told_of_result(result) for result in editor.history],
    }


def generated() -> Editor:
    """A source, an edit, another of the source, and one of that: two branches."""
    editor = load()
    source = editor.generate(CAT, **SOURCE)
    editor.edit(DOG)
    editor.checkout(source.id)
    editor.edit("a cat and a (castle:1.2) on a beach", mask=cells(5, 9, 6), structure=0.5)
    editor.edit("a fox and a (castle:1.2) on a beach", strength=0.6)
    editor.undo()
    return editor


def opened() -> Editor:
    """A picture whose sides no 8 divides, opened, and two edits."""
    editor = load()
    editor.open(picture("scene.png"), CAT, inversion="ddpm", **RECIPE)
    editor.edit(DOG)
    editor.edit(CASTLE, mask=box(147, 131).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    editor.undo()
    return editor


def look() -> Editor:
    """A plain source and an edit that takes the look of a picture."""
    editor = load()
    editor.load_adapter("demo-look", scale=0.9)
    editor.generate(CAT, **SOURCE)
    editor.edit(DOG, reference=picture("reference.png"))
    return editor


def write_sessions() -> dict[str, Any]:
    """Save the sessions; what they hold, and what one more edit makes of each."""
    told = {}
    for name, make in {"generated": generated, "opened": opened, "look": look}.items():
        editor = make()
        editor.save(FILES / "sessions" / name)
        told[name] = told_of_session(editor)
        resumed = Editor.resume(FILES / "sessions" / name, device="cpu", local_files_only=True)
        further = resumed.edit(FURTHER[name])
        assert pixels(further.image) == pixels(editor.edit(FURTHER[name]).image)
        save_picture(further.image, FILES / "further" / f"{name}.png")
        told[name]["further"] = told_of_result(further)
    return told


def write_pictures() -> dict[str, Any]:
    """Write pictures with metadata in every format; what `fisedit show` prints of each."""
    folder = FILES / "pictures"
    folder.mkdir()
    editor = load()
    editor.generate(CAT, negative_prompt="snow", **SOURCE)
    editor.edit(DOG)
    editor.edit("a dog and a (castle:1.2) on a beach", mask=cells(5, 9, 6), structure=0.3)
    editor.edit("a fox and a (castle:1.2) on a beach", strength=0.7)
    for ending in ENDINGS:
        editor.write(folder / f"edited.{ending}")
    save_picture(editor.current.image, FILES / "further" / "edited.png")
    source = ("generate", CAT, "--seed", "5", "--output", "source.png")
    checked(folder, *source, *STEPS, *PLACE, "--scheduler", "euler_a")
    photo(folder / "photo.jpg")
    box(147, 131).save(folder / "mask.png")
    edit = ("edit", "--picture", "photo.jpg", "--source-prompt", CAT, "--prompt", DOG, "--mask", "mask.png")
    checked(folder, *edit, "--output", "opened.jpg", *STEPS, *PLACE)
    names = [*(f"edited.{ending}" for ending in ENDINGS), "source.png", "opened.jpg"]
    return {name: json.loads(checked(folder, "show", name, "--json")) for name in names}


def photo(path: Path) -> None:
    """Write a picture with an owner's metadata: an author, and `parameters` of another program."""
    exif = Image.Exif()
    exif[0x013B] = "An Author"
    exif.get_ifd(0x8769)[0x9286] = b"ASCII\0\0\0a cat and a cake\nSteps: 20, Sampler: Euler, Seed: 1"
    picture("scene.png").save(path, quality=90, exif=exif)


def write_batch() -> dict[str, Any]:
    """Run the batches; what they printed, and what a run of the interrupted one has left to do."""
    folder = FILES / "batch"
    (folder / "in" / "more").mkdir(parents=True)
    (folder / "masks").mkdir()
    write_inputs(folder)
    printed = {"finished": batch(folder, "finished"), "rows": batch(folder, "rows")}
    interrupt(folder)
    done = [json.loads(line)["output"] for line in (folder / "interrupted" / JOURNAL).read_text().splitlines()]
    return {"printed": printed, "interrupted": done}


def write_inputs(folder: Path) -> None:
    """Small pictures in three formats, captions, masks, a table of edits, and a file that is no picture."""
    scene = picture("scene.png")
    scene.resize((96, 86)).save(folder / "in" / "a.png")
    scene.transpose(Image.Transpose.FLIP_LEFT_RIGHT).resize((90, 100)).save(folder / "in" / "b.jpg", quality=90)
    scene.crop((0, 30, 147, 131)).resize((110, 76)).save(folder / "in" / "c.webp", lossless=True)
    scene.convert("L").resize((72, 64)).save(folder / "in" / "d.png")
    (folder / "in" / "more" / "damaged.png").write_bytes(b"no picture")
    for name, size in (("a.png", (96, 86)), ("b.png", (90, 100)), ("c.png", (110, 76)), ("d.png", (72, 64))):
        box(*size).save(folder / "masks" / name)
    captions = [("a.png", CAT), ("b.jpg", CAT), ("c.webp", "a cat and a cake"), ("d.png", CAT)]
    text = "image,caption\n" + "".join(f"{name},{caption}\n" for name, caption in captions)
    (folder / "captions.csv").write_text(text, encoding="utf-8")
    rows: Sequence[dict[str, str]] = (
        {"image": "a.png", "prompt": DOG, "source_prompt": CAT},
        {"image": "a.png", "prompt": FOX, "source_prompt": CAT, "output": "fox/a.jpg"},
        {"image": "b.jpg", "prompt": "a dog", "mask": "b.png"},
        {"image": "d.png", "prompt": CAT, "source_prompt": CAT},
        {"image": "more/damaged.png", "prompt": DOG},
    )
    (folder / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def batch(folder: Path, name: str) -> dict[str, Any]:
    """Run a batch and return what it printed, but for its seconds."""
    done = run(folder, *JOBS[name], "--json")
    return {"status": done.returncode} | untimed(json.loads(done.stdout))


def untimed(told: dict[str, Any]) -> dict[str, Any]:
    """What a batch printed, without seconds."""
    items = [{key: value for key, value in item.items() if key != "seconds"} for item in told["items"]]
    return {"counts": told["counts"], "notes": told["notes"], "items": items}


def interrupt(folder: Path) -> None:
    """Run the batch and interrupt it once when its first item is done; it finishes the one in hand."""
    journal, out = folder / "interrupted" / JOURNAL, subprocess.DEVNULL
    command = [sys.executable, "-m", "fisedit", *JOBS["interrupted"]]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=out, stderr=out) as process:
        while not (journal.exists() and journal.read_bytes().count(b"\n")):
            assert process.poll() is None, "the batch ended before it could be interrupted"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130


def checked(folder: Path, *arguments: str) -> str:
    """What a command that must succeed printed."""
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def save_picture(image: Image.Image, path: Path) -> None:
    """Write pixels alone, as a small PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bare = Image.fromarray(np.asarray(image))
    bare.save(path, optimize=True)


def main() -> None:
    """Write all fixtures and what must be found in them."""
    torch.set_num_threads(1)
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir(parents=True)
    told = {"made_at": "7d06e12", "machine": machine(), "sessions": write_sessions()}
    told |= {"pictures": write_pictures(), "batch": write_batch()}
    INDEX.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
