"""Write the golden set anew: `python -m tests.golden.make`.

The set that is stored was made at the commit `MADE_AT`, and shows that behaviour did not change since. Make it anew
only for a change of behaviour that is meant, and set `MADE_AT` then. (It was the set of 7d06e12, before the package was
restructured, until boundaries were blended and regions had a rim where attention is in doubt; confidence is calibrated,
and a dense run's shared branch counted with its text, since; a region of low confidence takes its neighbours' cells;
of a transformer's norm what each row has part in its statistics is recorded, and shifted after dense steps; notes tell
why an edit ran dense; the demo model is another; cells beside a mask show the edit;
a step's fixed cost is counted by its layers, by which schedules are chosen; edits keep fewer bytes; oneDNN
multiplies float32 of sparse steps on AMD's CPUs; words that remove a thing erase it.)
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from PIL import Image

from fisedit.machine import contention
from tests.golden.cases import CASES, HERE, INPUTS, RECIPE, Bench, load
from tests.golden.outcome import machine, save

MADE_AT = "827c3c4"
INDEX, PICTURES = HERE / "golden.json", HERE / "pictures"
_PACKAGES = ("diffusers", "transformers", "peft", "numpy", "pillow")


def main() -> None:
    """Run every case and store what it makes."""
    torch.set_num_threads(1)
    contention.SCHEDSTAT = Path("/nowhere")  # no note says that this machine is busy
    if not INPUTS.exists():
        write_inputs()
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir()
    told = {
        "made_at": MADE_AT,
        "machine": machine(),
        "packages": {name: version(name) for name in _PACKAGES},
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name, case in CASES.items():
            shots = {shot: save(made, PICTURES, f"{name}.{shot}") for shot, made in case(bench)}
            told["cases"][name] = shots
            print(f"{name}: {len(shots)} outcomes")  # noqa: T201
    INDEX.write_text(_json(told), encoding="utf-8")


def write_inputs() -> None:
    """Write the pictures that cases open: a photograph, a drawn scene and a reference."""
    from skimage import data

    INPUTS.mkdir()
    Image.fromarray(data.astronaut()).crop((60, 0, 410, 294)).resize((100, 84)).save(INPUTS / "photo.png")
    editor = load()
    scene = editor.generate("a cat and a cake on a beach", **(RECIPE | {"seed": 11, "num_inference_steps": 25}))
    scene.image.resize((147, 131)).save(INPUTS / "scene.png")
    look = editor.generate("a panda and a drum in the snow", **(RECIPE | {"seed": 3, "num_inference_steps": 25}))
    look.image.save(INPUTS / "reference.png")


def _json(told: dict[str, object]) -> str:
    """JSON with one outcome a line."""
    cases = told.pop("cases")
    head = json.dumps(told, indent=1)[:-2]
    rows = [
        f'  "{name}": {{\n'
        + ",\n".join(f'   "{shot}": {json.dumps(values)}' for shot, values in shots.items())
        + "\n  }"
        for name, shots in cases.items()
    ]
    return head + ',\n "cases": {\n' + ",\n".join(rows) + "\n }\n}\n"


if __name__ == "__main__":
    main()
