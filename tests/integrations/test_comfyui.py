"""ComfyUI's nodes in integrations/comfyui: what ComfyUI reads of them, and what they make, without ComfyUI itself."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from fisedit.errors import FisEditError, InputError, MaskError, ModelError, PromptError, SessionError
from tests.support import comfyui
from tests.support.edits import CAT, DOG

OPTIONS = {  # of `InputTypeOptions` in comfy_types/node_typing.py, as far as ours have them
    "INT": {"default", "min", "max", "step", "tooltip", "control_after_generate"},
    "FLOAT": {"default", "min", "max", "step", "round", "tooltip"},
    "STRING": {"default", "multiline", "dynamicPrompts", "tooltip"},
    "COMBO": {"default", "tooltip", "advanced"},
}
CLASSES = {  # attributes that ComfyUI reads of a node's class
    "INPUT_TYPES",
    "RETURN_TYPES",
    "RETURN_NAMES",
    "FUNCTION",
    "CATEGORY",
    "DESCRIPTION",
    "IS_CHANGED",
}
OWN, GIVEN = {"FISEDIT_MODEL", "FISEDIT_PICTURE"}, {"IMAGE", "MASK"}
FOX = "a fox on a beach"
FEW = {"steps": 3, "width": 64, "height": 64}


@pytest.fixture(scope="module")
def pack():
    """The nodes, loaded as ComfyUI loads them."""
    return comfyui.load_nodes()


@pytest.fixture
def comfy(monkeypatch, tmp_path):
    """ComfyUI's modules, with empty folders of models."""
    found = comfyui.Comfy(tmp_path / "models")
    for kind in ("checkpoints", "diffusers"):
        (found.models / kind).mkdir(parents=True)
    for name, module in found.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.fixture
def session(pack, comfy, editor):
    """A loaded model."""
    return sys.modules[f"{pack.__name__}.sessions"].NodeSession(editor)


@pytest.fixture
def run(pack):
    """Runs a node as ComfyUI's executor does: in inference mode, with the widgets' defaults; outputs by their names."""

    def call(kind: str, node_id: str = "1", **given: object) -> SimpleNamespace:
        node = pack.NODE_CLASS_MAPPINGS[f"FisEdit{kind}"]
        inputs = node.INPUT_TYPES()
        usual = {
            name: options[0].get("default", each[0] if isinstance(each, list) else None)
            for name, (each, *options) in inputs["required"].items()
            if isinstance(each, list) or each in comfyui.WIDGETS
        }
        hidden = {name: node_id for name, each in inputs["hidden"].items() if each == "UNIQUE_ID"}
        with torch.inference_mode():
            made = getattr(node(), node.FUNCTION)(**usual | given | hidden)
        return SimpleNamespace(**dict(zip(node.RETURN_NAMES, made, strict=True)))

    return call


@pytest.fixture
def words(run, session):
    """A source of words."""
    return run("SourceFromWords", "source", model=session, prompt=CAT, seed=7, **FEW)


def left(height: int = 64, width: int = 64) -> torch.Tensor:
    """A MASK of the left half."""
    mask = torch.zeros(1, height, width)
    mask[..., : width // 2] = 1
    return mask


def photo(batch: int = 1, channels: int = 3) -> torch.Tensor:
    """An IMAGE whose values lie between levels."""
    return torch.rand(batch, 64, 64, channels, generator=torch.Generator().manual_seed(1))


class TestDefinitions:
    def test_names_are_our_own_and_shown(self, pack):
        assert len(pack.NODE_CLASS_MAPPINGS) == 8
        assert pack.NODE_CLASS_MAPPINGS.keys() == pack.NODE_DISPLAY_NAME_MAPPINGS.keys()
        assert all(name.startswith("FisEdit") and name.isidentifier() for name in pack.NODE_CLASS_MAPPINGS)
        assert all(shown.endswith(" (fisedit)") for shown in pack.NODE_DISPLAY_NAME_MAPPINGS.values())

    def test_classes_have_what_is_read_of_them(self, pack, comfy):
        for node in pack.NODE_CLASS_MAPPINGS.values():
            assert {name for name in vars(node) if name.isupper()} - {"IS_CHANGED"} == CLASSES - {"IS_CHANGED"}
            assert len(node.RETURN_TYPES) == len(node.RETURN_NAMES) == len(set(node.RETURN_NAMES))
            assert set(node.RETURN_TYPES) <= OWN | GIVEN | {"STRING"} and node.DESCRIPTION.endswith(".")
            assert node.CATEGORY == "fisedit" and set(node.INPUT_TYPES()) == {"required", "optional", "hidden"}

    def test_inputs_are_of_known_types_with_known_options(self, pack, comfy):
        for node in pack.NODE_CLASS_MAPPINGS.values():
            inputs = node.INPUT_TYPES()
            assert inputs["hidden"] in ({}, {"node_id": "UNIQUE_ID"})
            for kind, *more in (inputs["required"] | inputs["optional"]).values():
                name, options = "COMBO" if isinstance(kind, list) else kind, more[0] if more else {}
                assert name in OWN | GIVEN or options.keys() <= OPTIONS[name]
                if isinstance(kind, list) and "default" in options:
                    assert options["default"] in kind
                if name in {"INT", "FLOAT"}:
                    assert options["min"] <= options["default"] <= options["max"]
                assert "lazy" not in options, "nothing here leaves an input alone"

    def test_the_function_takes_every_input(self, pack, comfy):
        for node in pack.NODE_CLASS_MAPPINGS.values():
            inputs, function = node.INPUT_TYPES(), inspect.signature(getattr(node(), node.FUNCTION))
            function.bind(**inputs["required"] | inputs["hidden"])
            function.bind(**inputs["required"] | inputs["optional"] | inputs["hidden"])

    def test_what_depends_on_its_inputs_alone_is_cached_by_them(self, pack):
        """Only a model's file may change behind its name; `NOT_IDEMPOTENT` and a changing `IS_CHANGED` run anew."""
        with_file = [name for name, node in pack.NODE_CLASS_MAPPINGS.items() if hasattr(node, "IS_CHANGED")]
        assert with_file == ["FisEditLoadModel"]
        kept = {
            name for name, node in pack.NODE_CLASS_MAPPINGS.items() if "node_id" in str(inspect.signature(node.run))
        }
        assert kept < set(pack.NODE_CLASS_MAPPINGS) and "FisEditUndo" not in kept

    def test_seeds_of_sources_are_drawn_by_the_page_and_those_of_variations_are_not(self, pack):
        seed = pack.NODE_CLASS_MAPPINGS["FisEditSourceFromWords"].INPUT_TYPES()["required"]["seed"][1]
        variation = pack.NODE_CLASS_MAPPINGS["FisEditEdit"].INPUT_TYPES()["optional"]["variation"][1]
        assert seed["control_after_generate"] and "control_after_generate" not in variation

    def test_the_registrys_file_names_what_it_asks_for(self):
        told = tomllib.loads((comfyui.FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
        assert told["project"]["name"] == "fisedit" and told["project"]["version"].count(".") == 2
        assert told["project"]["license"] == {"text": "Apache-2.0"} and told["project"]["dependencies"] == ["fisedit"]
        assert told["tool"]["comfy"].keys() == {"PublisherId", "DisplayName", "Icon"}


@pytest.mark.parametrize("path", comfyui.WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_fits_the_nodes(pack, comfy, path):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    inputs = {name: each for name, (each, _) in comfyui.CORE.items()}
    outputs = {name: each for name, (_, each) in comfyui.CORE.items()}
    for name, node in pack.NODE_CLASS_MAPPINGS.items():
        types = node.INPUT_TYPES()
        inputs[name], outputs[name] = types["required"] | types["optional"], node.RETURN_TYPES
    prompt = comfyui.to_prompt(workflow, inputs)
    for node in prompt.values():
        needed = (
            pack.NODE_CLASS_MAPPINGS[node["class_type"]].INPUT_TYPES()["required"]
            if "FisEdit" in node["class_type"]
            else {}
        )
        assert needed.keys() <= node["inputs"].keys() <= inputs[node["class_type"]].keys()
        for name, value in node["inputs"].items():
            kind = inputs[node["class_type"]][name][0]
            if isinstance(value, list):
                assert kind in ("*", outputs[prompt[value[0]]["class_type"]][value[1]])
            elif isinstance(kind, list):
                assert value in kind
            else:
                assert isinstance(value, {"INT": int, "FLOAT": (int, float), "STRING": str}[kind])
    assert {node["type"] for node in workflow["nodes"]} == {node["class_type"] for node in prompt.values()}


class TestModels:
    def test_those_in_comfyuis_folders_are_offered(self, pack, comfy, model):
        (comfy.models / "checkpoints" / "a.safetensors").write_bytes(b"")
        (comfy.models / "checkpoints" / "b.ckpt").write_bytes(b"")
        (comfy.models / "diffusers" / "mine").symlink_to(model)
        offered = pack.NODE_CLASS_MAPPINGS["FisEditLoadModel"].INPUT_TYPES()["required"]["model"][0]
        assert offered == ["demo", "a.safetensors", "mine"]

    def test_the_last_one_stays_until_its_file_is_another(self, run, pack, comfy, model):
        shutil.copytree(model, comfy.models / "diffusers" / "mine")
        first = run("LoadModel", model="mine", device="cpu").model
        assert run("LoadModel", model="mine", device="cpu").model is first
        assert comfy.unloaded == 1, "ComfyUI's own models make room for it"
        is_changed = pack.NODE_CLASS_MAPPINGS["FisEditLoadModel"].IS_CHANGED
        before = is_changed(model="mine", device="cpu")
        assert before == is_changed(model="mine", device="cpu")
        os.utime(comfy.models / "diffusers" / "mine" / "model_index.json", (1, 1))
        assert is_changed(model="mine", device="cpu") != before
        assert run("LoadModel", model="mine", device="cpu").model is not first

    def test_one_that_is_gone_is_one_line(self, run, comfy):
        with pytest.raises(
            ModelError, match=r"model must be one of ComfyUI's .*, got 'gone.safetensors'; refresh them"
        ):
            run("LoadModel", model="gone.safetensors")


class TestSources:
    def test_from_words_are_what_the_editor_makes(self, words, editor, session):
        picture, (result,) = words.picture, words.picture.results
        assert picture.session is session and (result.config.seed, result.prompt) == (7, CAT)
        assert words.image.shape == (1, 64, 64, 3) and words.image.dtype == torch.float32
        assert (words.image[0].numpy() == np.asarray(result.image, np.float32) / 255).all()
        assert words.text.endswith(" s") or "; " in words.text

    def test_a_batch_has_one_seed_after_another(self, run, session):
        made = run("SourceFromWords", model=session, prompt=CAT, seed=7, batch_size=2, **FEW)
        assert [result.config.seed for result in made.picture.results] == [7, 8] and made.image.shape[0] == 2

    @pytest.mark.parametrize(("batch", "channels"), [(1, 3), (2, 3), (1, 4), (1, 1)])
    def test_from_images_have_the_very_numbers_that_came_in(self, run, session, batch, channels):
        image = photo(batch, channels)
        made = run("SourceFromImage", model=session, image=image, prompt=CAT, steps=3)
        assert torch.equal(made.image, image) and len(made.picture.results) == batch

    def test_half_precision_is_rounded_to_the_level_that_was_meant(self, run, session):
        levels = torch.arange(256, dtype=torch.float32).reshape(1, 16, 16, 1).expand(1, 16, 16, 3).repeat(1, 4, 4, 1)
        made = run("SourceFromImage", model=session, image=(levels / 255).half(), prompt=CAT, steps=3)
        assert (np.asarray(made.picture.results[0].image) == levels[0].numpy()).all()
        assert made.image.dtype == torch.float16

    def test_nothing_runs_again_while_the_inputs_stay(self, run, session, words, comfy):
        again = run("SourceFromWords", "source", model=session, prompt=CAT, seed=7, **FEW)
        assert again.picture is words.picture
        opened = run("SourceFromImage", "opened", model=session, image=photo(), prompt=CAT, steps=3)
        steps = len(comfy.steps)
        assert (
            run("SourceFromImage", "opened", model=session, image=photo(), prompt=CAT, steps=3).picture
            is opened.picture
        )
        assert len(comfy.steps) == steps
        assert run("SourceFromWords", "source", model=session, prompt=CAT, seed=8, **FEW).picture is not words.picture

    @pytest.mark.parametrize(
        ("image", "got"),
        [(torch.zeros(64, 64, 3), r"\[64, 64, 3\]"), (torch.full((1, 64, 64, 3), torch.nan), "NaN")],
    )
    def test_what_is_no_image_is_one_line(self, run, session, image, got):
        with pytest.raises(InputError, match=f"image must be numbers .*, got {got}; look at what made it"):
            run("SourceFromImage", model=session, image=image, prompt=CAT, steps=3)


class TestEdits:
    def test_an_edit_is_the_editors_own(self, run, words, pipelines):
        from fisedit import Editor

        made = run("Edit", picture=words.picture, prompt=DOG, mask=left())
        plain = Editor(pipelines["shallow"])
        plain.generate(CAT, seed=7, num_inference_steps=3, width=64, height=64)
        expected = plain.edit(DOG, mask=np.asarray(left()[0], bool))
        assert (np.asarray(made.picture.results[0].image) == np.asarray(expected.image)).all()
        assert torch.equal(made.mask, left()) and made.picture.parent is words.picture

    def test_it_depends_on_its_inputs_alone(self, run, words):
        first = run("Edit", "a", picture=words.picture, prompt=DOG, mask=left())
        other = run("Edit", "b", picture=words.picture, prompt=FOX, mask=1 - left())
        behind = run("Edit", "c", picture=first.picture, prompt=FOX, mask=left())
        again = run("Edit", "d", picture=words.picture, prompt=DOG, mask=left())
        assert torch.equal(again.image, first.image) and not torch.equal(other.image, first.image)
        assert behind.picture.parent is first.picture

    def test_pixels_outside_the_mask_keep_their_exact_numbers(self, run, session):
        image = photo(2)
        opened = run("SourceFromImage", model=session, image=image, prompt=CAT, steps=3)
        edit = run("Edit", picture=opened.picture, prompt=DOG, mask=left(32, 32))
        behind = run("Edit", picture=edit.picture, prompt=FOX, mask=left(32, 32))
        for made in (edit, behind):
            assert torch.equal(made.image[:, :, 32:], image[:, :, 32:])
            assert not torch.equal(made.image[:, :, :32], image[:, :, :32])

    def test_masks_are_one_for_all_or_one_for_each(self, run, session):
        opened = run("SourceFromImage", model=session, image=photo(2), prompt=CAT, steps=3)
        both = torch.cat([left(), 1 - left()])
        made = run("Edit", picture=opened.picture, prompt=DOG, mask=both)
        assert torch.equal(made.mask, both)
        with pytest.raises(MaskError, match="mask must be one, or one for each of 2 pictures, got 3"):
            run("Edit", picture=opened.picture, prompt=DOG, mask=left().repeat(3, 1, 1))

    def test_load_images_placeholder_is_no_mask_and_another_empty_one_changes_nothing(self, run, words):
        by_words = run("Edit", "a", picture=words.picture, prompt=DOG)
        placeholder = run("Edit", "b", picture=words.picture, prompt=DOG, mask=torch.zeros(1, 64, 64))
        assert torch.equal(by_words.mask, placeholder.mask)
        empty = run("Edit", "c", picture=words.picture, prompt=DOG, mask=torch.zeros(1, 128, 128))
        assert torch.equal(empty.image, words.image) and not empty.mask.any()
        assert "nothing was edited: the mask is empty" in empty.text

    def test_a_variation_has_other_noise(self, run, words):
        usual, other, same = (
            run("Edit", f"{i}", picture=words.picture, prompt=DOG, mask=left(), variation=seed).image
            for i, seed in enumerate((0, 5, 5))
        )
        assert not torch.equal(usual, other) and torch.equal(other, same)

    def test_erasing_needs_a_place(self, run, words):
        with pytest.raises(InputError, match="erase needs a mask or words, got neither"):
            run("Erase", picture=words.picture)
        made = run("Erase", picture=words.picture, mask=left())
        assert torch.equal(made.image[:, :, 32:], words.image[:, :, 32:])
        assert not torch.equal(made.image, words.image) and made.picture.results[0].run.erases

    def test_words_lie_inside_the_mask(self, run, words):
        asked = {"picture": words.picture, "prompt": DOG, "words": "cat"}
        named, inside = (run("PreviewRegion", **asked, mask=mask).mask.bool() for mask in (None, left()))
        assert inside.any() and torch.equal(inside, named & left().bool()) and inside.sum() < left().sum()

    def test_undo_goes_back_and_no_further(self, run, words):
        first = run("Edit", "a", picture=words.picture, prompt=DOG, mask=left())
        second = run("Edit", "b", picture=first.picture, prompt=FOX, mask=left())
        assert run("Undo", picture=second.picture, edits=2).picture is words.picture
        assert torch.equal(run("Undo", picture=second.picture).image, first.image)
        with pytest.raises(SessionError, match="edits must be at most 2, as many as the picture has, got 3"):
            run("Undo", picture=second.picture, edits=3)

    def test_comparing_runs_the_prompt_in_full(self, run, words, editor):
        made = run("Edit", picture=words.picture, prompt=DOG, mask=left())
        found = run("Compare", picture=made.picture)
        full, _ = editor.dense(made.picture.results[0].id)
        assert (found.full_run[0].numpy() == np.asarray(full, np.float32) / 255).all()
        assert torch.equal(found.before, words.image)
        assert torch.equal(found.changed.bool(), (made.image != words.image).any(-1)) and found.changed.any()
        assert "a full run took" in found.text and "0 pixels changed outside the mask" in found.text
        with pytest.raises(SessionError, match="compare needs an edit, got a source"):
            run("Compare", picture=words.picture)

    def test_a_preview_shows_the_region_and_keeps_nothing(self, run, words, editor):
        before, corner = len(editor.history), torch.zeros(1, 64, 64)
        corner[:, :16, :16] = 1
        found = run("PreviewRegion", picture=words.picture, prompt=DOG, mask=corner)
        assert torch.equal(found.mask, corner) and found.overlay.shape == (1, 64, 64, 3)
        assert torch.equal(found.overlay[:, :, 16:], words.image[:, :, 16:])
        assert found.text.startswith("6% of the picture, confidence 100%") and len(editor.history) == before
        dense = run("PreviewRegion", picture=words.picture, prompt=DOG, mask=left())
        assert dense.text.startswith(
            "only the region is painted, but all of the picture is computed: the region alone takes"
        )
        assert run("PreviewRegion", picture=words.picture, prompt=CAT).text.startswith("nothing would change: ")

    @pytest.mark.parametrize(
        ("given", "error"), [({"prompt": ""}, PromptError), ({"prompt": DOG, "strength": 0.0}, InputError)]
    )
    def test_errors_are_one_line(self, run, words, given, error):
        with pytest.raises(error) as raised:
            run("Edit", picture=words.picture, mask=left(), **given)
        assert isinstance(raised.value, FisEditError) and "\n" not in str(raised.value)


class TestRuns:
    def test_steps_and_previews_reach_the_node(self, run, session, comfy):
        run("SourceFromWords", model=session, prompt=CAT, batch_size=2, **FEW)
        assert comfy.steps == [(i, 6) for i in range(6)]
        kind, picture, side = comfy.previews[-1]
        assert (kind, picture.mode, side) == ("JPEG", "RGB", 512)

    def test_stopping_ends_it_as_comfyui_asks_and_leaves_all_as_it_was(self, run, words, comfy, editor):
        before, comfy.stop_at = [result.id for result in editor.history], len(comfy.steps) + 1
        with pytest.raises(comfyui.Interrupted):
            run("Edit", "a", picture=words.picture, prompt=DOG, mask=left())
        assert [result.id for result in editor.history] == before
        comfy.stop_at = None
        assert run("Edit", "a", picture=words.picture, prompt=DOG, mask=left()).image is not None

    def test_what_no_workflow_holds_is_forgotten(self, run, words, editor):
        for seed in range(4):
            made = run("Edit", "edit", picture=words.picture, prompt=DOG, mask=left(), variation=seed)
        assert len(editor.history) == 3, "the source, this edit, and the one that was held while it ran"
        behind = run("Edit", "behind", picture=made.picture, prompt=FOX, mask=left())
        del made
        run("Edit", "edit", picture=words.picture, prompt=DOG, mask=left(), variation=9)
        assert behind.picture.parent.results[0] in editor.history, "an edit of it is held"

    def test_nodes_that_ran_long_ago_are_forgotten(self, run, words, session, pack, monkeypatch):
        monkeypatch.setattr(sys.modules[f"{pack.__name__}.sessions"], "KEPT_NODES", 2)
        for node in ("a", "b", "c"):
            run("Undo", picture=run("Edit", node, picture=words.picture, prompt=DOG, mask=left()).picture)
        assert list(session.kept) == ["b", "c"]


@pytest.mark.skipif("FISEDIT_COMFYUI" not in os.environ, reason="needs a ComfyUI that runs, at FISEDIT_COMFYUI")
def test_the_workflows_run_in_comfyui_itself():
    assert len(list(comfyui.try_nodes(comfyui.Server(os.environ["FISEDIT_COMFYUI"])))) == 6


def test_a_picture_goes_to_tensors_and_back(pack):
    tensors = sys.modules[f"{pack.__name__}.tensors"]
    for mode in ("L", "RGB", "RGBA"):
        picture = Image.effect_noise((16, 8), 90).convert(mode)
        image = tensors.to_image(picture)
        assert image.shape == (1, 8, 16, len(mode)) and tensors.to_pictures(image)[0].tobytes() == picture.tobytes()
