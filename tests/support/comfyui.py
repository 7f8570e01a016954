"""ComfyUI for tests of our nodes: facts of its published definitions, its modules as far as nodes ask for them, and a
trial in a ComfyUI that runs: `python -m tests.support.comfyui http://127.0.0.1:8188`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlencode

import torch
from PIL import Image

from tests.support.documents import ROOT

FOLDER = ROOT / "integrations" / "comfyui"
WORKFLOWS = sorted((FOLDER / "example_workflows").glob("*.json"))
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
"""Types of inputs that a node shows as a widget; a list of choices is one too (comfy_types/node_typing.py)."""

CORE: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "LoadImage": ({"image": (["example.png"], {"image_upload": True})}, ("IMAGE", "MASK")),
    "SaveImage": ({"images": ("IMAGE", {}), "filename_prefix": ("STRING", {"default": "ComfyUI"})}, ()),
    "PreviewImage": ({"images": ("IMAGE",)}, ()),
    "PreviewAny": ({"source": ("*", {})}, ()),
}
"""Inputs and outputs of ComfyUI's own nodes that the workflows use (nodes.py, comfy_extras/nodes_preview_any.py)."""


class Interrupted(Exception):
    """ComfyUI's InterruptProcessingException."""


class Comfy:
    """What ComfyUI's modules were told, and what they answer.

    Attributes:
        steps: (value, total) of every step that a progress bar got.
        previews: what it got to show.
        unloaded: how often ComfyUI's own models were asked to leave memory.
        stop_at: the number of steps after which the user stops the run; None for never.
    """

    def __init__(self, models: Path) -> None:
        self.models, self.stop_at, self.unloaded = models, None, 0
        self.steps: list[tuple[int, int]] = []
        self.previews: list[tuple[str, Image.Image, int] | None] = []

    def modules(self) -> dict[str, ModuleType]:
        """The modules by their names."""
        comfy, utils, management, paths = map(
            ModuleType, ("comfy", "comfy.utils", "comfy.model_management", "folder_paths")
        )
        recorder = self

        class ProgressBar:
            def __init__(self, total: int, node_id: str | None = None) -> None:
                pass

            def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
                recorder.steps.append((value, total))
                recorder.previews.append(preview)

        def throw_exception_if_processing_interrupted() -> None:
            if self.stop_at is not None and len(self.steps) >= self.stop_at:
                raise Interrupted

        def unload_all_models() -> None:
            self.unloaded += 1

        def get_filename_list(kind: str) -> list[str]:
            return sorted(str(path.relative_to(self.models / kind)) for path in (self.models / kind).rglob("*.*"))

        def get_full_path(kind: str, name: str) -> str | None:
            path = self.models / kind / name
            return str(path) if path.is_file() else None

        utils.ProgressBar = ProgressBar
        management.throw_exception_if_processing_interrupted = throw_exception_if_processing_interrupted
        management.unload_all_models = unload_all_models
        management.get_torch_device = lambda: torch.device("cpu")
        paths.get_filename_list, paths.get_full_path = get_filename_list, get_full_path
        paths.get_folder_paths = lambda kind: [str(self.models / kind)]
        comfy.utils, comfy.model_management = utils, management
        return {each.__name__: each for each in (comfy, utils, management, paths)}


def load_nodes() -> ModuleType:
    """Load the nodes as ComfyUI does: a package whose name is its folder's path, without dots."""
    name = str(FOLDER).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, FOLDER / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def widgets(inputs: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the inputs that are widgets, with the number of values that each has in a workflow."""
    for name, (kind, *options) in inputs.items():
        if isinstance(kind, list) or kind in WIDGETS:
            has_second = (
                any(options[0].get(key) for key in ("control_after_generate", "image_upload")) if options else 0
            )
            yield name, 1 + bool(has_second)


def to_prompt(workflow: Mapping[str, Any], definitions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Turn a workflow as the page saves it into what the page sends.

    Args:
        workflow: nodes and links.
        definitions: name of a node -> its inputs.
    """
    links = {link[0]: (str(link[1]), link[2]) for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        values, inputs = list(node.get("widgets_values", [])), {}
        for name, count in widgets(definitions[node["type"]]):
            if values:
                inputs[name] = values[0]
                del values[:count]
        assert not values, f"{node['type']} has values of no widget: {values}"
        inputs |= {each["name"]: list(links[each["link"]]) for each in node["inputs"] if each["link"] is not None}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


class Server:
    """A ComfyUI that runs.

    Args:
        url: its address.
    """

    def __init__(self, url: str) -> None:
        import httpx

        self.http = httpx.Client(base_url=url.rstrip("/"), timeout=600)
        self.definitions = {
            name: each["input"].get("required", {}) | each["input"].get("optional", {})
            for name, each in self.http.get("/object_info").json().items()
        }

    def upload(self, image: Image.Image, name: str) -> str:
        """Put a picture into ComfyUI's input folder."""
        file = BytesIO()
        image.save(file, "PNG")
        answer = self.http.post("/upload/image", files={"image": (name, file.getvalue())}, data={"overwrite": "true"})
        return answer.json()["name"]

    def run(self, prompt: Mapping[str, Any], *, during: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Run a prompt, and return its history: outputs, and a status with messages."""
        answer = self.http.post("/prompt", json={"prompt": prompt})
        assert answer.status_code == 200, answer.text
        during()
        name = answer.json()["prompt_id"]
        while name not in (history := self.http.get(f"/history/{name}").json()):
            time.sleep(0.1)
        return history[name]

    def image(self, told: Mapping[str, str]) -> Image.Image:
        """Get a picture that an output names."""
        return Image.open(BytesIO(self.http.get(f"/view?{urlencode(told)}").content))


def executed(history: Mapping[str, Any]) -> set[str]:
    """Return the ids of the nodes with an output that was not in ComfyUI's cache."""
    messages = dict(history["status"]["messages"])
    return history["outputs"].keys() - set(messages["execution_cached"]["nodes"])


def try_nodes(server: Server) -> Iterator[str]:
    """Run both workflows and what their users would do next; yield a line for each step that held."""
    import numpy as np

    by_words, photograph = (json.loads(path.read_text(encoding="utf-8")) for path in WORKFLOWS)
    prompt = to_prompt(by_words, server.definitions)
    first = server.run(prompt)
    assert first["status"]["status_str"] == "success", first["status"]
    texts = [first["outputs"][node]["text"][0] for node in ("6", "9", "12")]
    yield f"edit_by_words ran: {' | '.join(texts)}"
    source, edit, full = (server.image(first["outputs"][node]["images"][0]) for node in ("3", "8", "11"))
    assert source.size == edit.size == full.size and source.tobytes() != edit.tobytes()

    again = server.run(prompt)
    assert len(dict(again["status"]["messages"])["execution_cached"]["nodes"]) == len(prompt)
    yield "unchanged inputs run nothing"

    prompt["7"]["inputs"]["prompt"] = "a fox and a cake on a beach"
    other = server.run(prompt)
    cached = set(dict(other["status"]["messages"])["execution_cached"]["nodes"])
    assert {"1", "2", "3", "4"} <= cached and not {"7", "8", "9", "10"} & cached
    assert server.image(other["outputs"]["8"]["images"][0]).tobytes() != edit.tobytes()
    prompt["7"]["inputs"]["prompt"] = "a dog and a cake on a beach"
    back = server.image(server.run(prompt)["outputs"]["8"]["images"][0])
    assert back.tobytes() == edit.tobytes()
    yield "an edit is the same again after another one"

    prompt["2"]["inputs"] |= {"seed": 8, "steps": 900}
    stopped = server.run(prompt, during=lambda: (time.sleep(3), server.http.post("/interrupt")))
    assert stopped["status"]["messages"][-1][0] == "execution_interrupted"
    yield "stopping ends the run"
    prompt["2"]["inputs"] |= {"seed": 7, "steps": 25}
    prompt["7"]["inputs"]["prompt"] = ""
    refused = dict(server.run(prompt)["status"]["messages"])["execution_error"]
    assert "\n" not in refused["exception_message"].strip()
    yield f"an error is one line: {refused['exception_message'].strip()}"

    prompt = to_prompt(photograph, server.definitions)
    noise = np.random.default_rng(0).integers(0, 255, (192, 160, 3), np.uint8)
    photo = Image.fromarray(np.dstack([noise, np.full((192, 160), 255, np.uint8)]))
    photo.putalpha(Image.fromarray(np.where(np.arange(160) < 64, 0, 255).astype(np.uint8)[None].repeat(192, 0)))
    prompt["2"]["inputs"]["image"] = server.upload(photo, "fisedit.png")
    prompt["6"]["inputs"]["words"] = ""
    made = server.run(prompt)
    assert made["status"]["status_str"] == "success", made["status"]
    edit, erased, undone = (np.asarray(server.image(made["outputs"][node]["images"][0])) for node in ("5", "7", "9"))
    assert (edit[:, 64:] == noise[:, 64:]).all() and (edit[:, :64] != noise[:, :64]).any()
    assert (erased[:, 64:] == noise[:, 64:]).all() and (undone == noise).all()
    yield "edit_photograph ran; pixels outside the mask are those of the file"


if __name__ == "__main__":
    for line in try_nodes(Server(sys.argv[1])):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
