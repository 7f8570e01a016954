"""The demo model that ships, and its adapters: complete, small, and with the checksums of `weights/README.md`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from benchmarks.classifier import WORDS, classify, load_classifier
from benchmarks.drive import measure_drive_quality
from benchmarks.quality.edit_quality import CLASSIFIER_FILE
from benchmarks.settings import DriveQualitySettings
from fisedit import Editor
from fisedit.adapters.lora import FILE, suggested_sampling
from fisedit.adapters.row_column.checkpoints import load_adapter
from fisedit.errors import AdapterError
from fisedit.models import loader, paths
from tests.support.edits import pixels_outside

WEIGHTS = Path(__file__).resolve().parents[2] / "weights"
README = WEIGHTS / "README.md"
START, END = "<!-- sha256 -->\n", "<!-- end -->\n"
MOST_BYTES = 60_000_000


def table() -> str:
    """The checksums of all weights that ship as a Markdown table."""
    files = sorted(WEIGHTS.rglob("*.safetensors"))
    rows = [f"| `{f.relative_to(WEIGHTS)}` | `{hashlib.sha256(f.read_bytes()).hexdigest()}` |" for f in files]
    return "\n".join(["| file | SHA-256 |", "|---|---|", *rows]) + "\n"


def with_table(text: str) -> str:
    """`text` with the present table between its marks."""
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END)[1]


def test_the_readme_tells_the_checksums():
    text = README.read_text(encoding="utf-8")
    assert text == with_table(text), "run `python -m tests.models.test_weight_files`"


def test_the_demo_model_loads_and_is_small():
    folder = paths.demo_folder()
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= MOST_BYTES
    pipe = loader.load("demo", device="cpu", dtype="fp32")
    assert pipe.unet.config.in_channels == 4


def test_the_demo_model_is_found_in_a_wheel_and_in_a_checkout(monkeypatch, tmp_path):
    assert paths.demo_folder() == WEIGHTS / "demo"
    monkeypatch.setattr(paths, "_WEIGHT_FOLDERS", (tmp_path,))
    with pytest.raises(loader.ModelError, match="not in this copy"):
        paths.demo_folder()
    with pytest.raises(AdapterError, match="demo-look is not in this copy"):
        load_adapter("demo-look")


@pytest.mark.parametrize("name", paths.DEMO_ADAPTERS)
def test_the_demo_models_adapters_load_and_are_small(name):
    folder = paths.demo_adapter_folder(name)
    assert folder == WEIGHTS / name
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20_000_000
    Editor.from_pretrained("demo", device="cpu").load_adapter(name)  # which refuses NaN and infinity


@pytest.mark.parametrize("name", paths.DEMO_LORAS)
def test_the_demo_models_loras_load_and_are_small(name):
    folder = paths.demo_adapter_folder(name)
    assert folder == WEIGHTS / name
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20_000_000
    weights = load_file(folder / FILE)
    assert all(weight.isfinite().all() for weight in weights.values())


def test_four_steps_paint_what_is_asked_for():
    editor = Editor.from_pretrained("demo", device="cpu")
    editor.load_lora("demo-fast")
    sampling = vars(suggested_sampling("demo-fast"))
    assert sampling == {"scheduler": "lcm", "num_inference_steps": 4, "guidance_scale": 1.0}
    classifier, seen = load_classifier(paths.demo_folder() / CLASSIFIER_FILE), []
    for seed, (old, new) in enumerate([("cat", "dog"), ("panda", "fox"), ("car", "castle")]):
        source = editor.generate(f"a {old} and a tree on the grass", seed=seed, **sampling)
        edit = editor.edit(f"a {new} and a tree on the grass")
        assert edit.stats.mask_area < 0.5 and pixels_outside(edit, source)
        found = classify(classifier, np.stack([np.asarray(result.image) for result in (source, edit)])).objects
        seen += [bool(found[row, WORDS.index(word)]) for row, word in enumerate((old, new))]
    assert sum(seen) >= 5


def test_an_edit_takes_a_references_look_and_nothing_else_moves():
    editor = Editor.from_pretrained("demo", device="cpu")
    editor.load_adapter("demo-look")
    editor.generate("a cat and a cake on a beach", seed=7, num_inference_steps=10, width=128, height=128)
    mask = np.zeros((16, 16), bool)
    mask[6:14, 1:8] = True
    grey = Image.new("RGB", (128, 128), (150, 150, 150))
    plain = editor.edit("a dog and a cake on a beach", mask=mask)
    editor.undo()
    looked = editor.edit("a dog and a cake on a beach", mask=mask, reference=grey)
    inside = np.kron(mask, np.ones((8, 8), bool))
    assert (np.asarray(plain.image)[~inside] == np.asarray(looked.image)[~inside]).all()
    assert not (np.asarray(plain.image)[inside] == np.asarray(looked.image)[inside]).all()


def test_heads_follow_their_poses_and_nothing_else_moves():
    settings = DriveQualitySettings(adapter="demo-pose", edits=1, num_inference_steps=10, seed=5, dtype="fp32")
    report = measure_drive_quality(settings)
    driven, at_rest = report["summary"]
    assert driven["tilt_error"] <= 8 < at_rest["tilt_error"] and driven["iou"] > at_rest["iou"]
    assert all(row["identical_outside"] for row in report["rows"])


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
