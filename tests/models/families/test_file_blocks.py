"""Single files with fewer blocks: their numbers are read off the names, and what is loaded is diffusers' own."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from fisedit import Editor
from fisedit.errors import ModelError
from fisedit.models import loader
from fisedit.models.families import family
from tests.support import oracle
from tests.support.edits import CAT, FP32, as_oracle, latents, trajectory
from tests.support.pipelines import DISTILLED, build_pipeline
from tests.support.single_file import save_single_file

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def families(pipelines, tmp_path, monkeypatch):
    """The configurations of tiny families, in a folder of their own."""
    for name in ("sd15", "sdxl"):
        pipelines[name].save_pretrained(tmp_path / name)
    monkeypatch.setattr(family, "CONFIGS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("has_gaps", [False, True], ids=["in turn", "with gaps"])
@pytest.mark.parametrize("name", DISTILLED)
def test_one_file_of_a_distilled_relative_is_diffusers_own(families, name, has_gaps):
    """Which `from_single_file` loads by the folder's configurations; files with gaps it cannot."""
    pipe = build_pipeline(name)
    path = save_single_file(pipe, families / "model.safetensors", has_gaps=has_gaps)
    if not has_gaps:
        pipe.save_pretrained(families / "own")
        options = {"config": str(families / "own"), "local_files_only": True}
        pipe = type(pipe).from_single_file(str(path), safety_checker=None, **options)
    editor = Editor(loader.load(path, dtype="fp32"))
    assert editor.pipe.notes == ()
    result = editor.generate(CAT, seed=7, num_inference_steps=2, width=128, height=128)
    dense = oracle.dense_generate(pipe, as_oracle(result.config))
    assert oracle.deviation(latents(trajectory(editor, result)), dense.latents) <= FP32


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_a_whole_family_keeps_its_configuration(families, pipelines, name):
    loaded = loader.load(save_single_file(pipelines[name], families / "model.safetensors"), dtype="fp32")
    kept = (json.loads(pipe.unet.to_json_string()) for pipe in (loaded, pipelines[name]))
    assert len({str({key: value for key, value in one.items() if not key.startswith("_")}) for one in kept}) == 1


@pytest.mark.parametrize(
    ("lacks", "got"),
    [
        ("output_blocks.4.1.transformer", r"and \[\(0, 0, 0\), \(1, 0, 1\), .* on its way up"),
        ("input_blocks.4.", r"\[\(1, 1\), \(1,\), \(1, 1\), \(0, 0\)\] on its way down"),
        ("middle_block.2.", "1 in the middle"),
    ],
)
def test_blocks_that_diffusers_has_not_are_named(families, pipelines, lacks, got):
    path = save_single_file(pipelines["sd15"], families / "model.safetensors")
    save_file({name: t for name, t in load_file(path).items() if f"model.{lacks}" not in name}, path)
    with pytest.raises(ModelError, match=rf"must have blocks that diffusers has, .*{got}.*diffusers folder") as caught:
        loader.load(path, dtype="fp32")
    assert "\n" not in str(caught.value)


def test_a_middle_of_another_depth_than_its_level_is_refused(families, pipelines):
    path = save_single_file(pipelines["sdxl"], families / "model.safetensors")
    found = load_file(path)
    save_file({name: t for name, t in found.items() if "middle_block.1.transformer_blocks.2" not in name}, path)
    with pytest.raises(ModelError, match="2 in the middle"):
        loader.load(path, dtype="fp32")
