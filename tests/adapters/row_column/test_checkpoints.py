"""Adapters on disk: every published family as it is, round trips, and one clear line for everything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fisedit import Editor
from fisedit.adapters.row_column import checkpoints, variants
from fisedit.adapters.row_column.checkpoints import (
    check_fit,
    fresh_adapter,
    identity,
    load_adapter,
    save_adapter,
)
from fisedit.adapters.row_column.variants import FAMILIES
from fisedit.errors import AdapterError, NumericsError
from fisedit.models import paths
from fisedit.models.families import family as families
from tests.support import oracle
from tests.support.adapters import lively
from tests.support.edits import CAT
from tests.support.pipelines import build_pipeline
from tests.support.references import QUICK, RED, check_guided, pixels
from tests.support.single_file import save_single_file

KEYS = Path(__file__).resolve().parents[2] / "fixtures" / "hellomeme" / "full_size_keys.json"
PUBLISHED = {
    "HMReferenceAdapter(v1)": "v1",
    "HMReferenceAdapter(v2)": "v2",
    "HM3ReferenceAdapter": "v3",
    "HM5ReferenceAdapter": "v5",
    "HM5bReferenceAdapter": "v5b",
}


def full_size() -> dict[str, dict[str, tuple[int, ...]]]:
    return {kind: {k: tuple(v) for k, v in shapes.items()} for kind, shapes in json.loads(KEYS.read_text()).items()}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("named", [True, False], ids=["by its class", "by its tensors"])
def test_every_published_file_is_recognised(kind, named):
    """Names and shapes alone: the adapter is built without memory."""
    shapes, path = full_size()[kind], Path("there")
    config = {"_class_name": kind.partition("(")[0], "_name_or_path": "x", "num_attention_heads": 8} if named else {}
    if kind.endswith("(v2)") and named:
        config["version"] = "v2"
    family = variants.family_of(config, shapes, path)
    adapter = checkpoints._empty(family, shapes, config, path)
    own = {name: tuple(tensor.shape) for name, tensor in adapter.state_dict().items()}
    is_unused_tensor = {
        name for name in shapes if "time_emb_proj" in name or name.startswith("reference_modules_down.3.")
    }
    assert family.name == PUBLISHED[kind]
    assert own == {name: shape for name, shape in shapes.items() if name not in is_unused_tensor}
    assert all(tensor.is_meta for tensor in adapter.state_dict().values())


@pytest.mark.parametrize("kind", PUBLISHED)
def test_every_published_file_fits_stable_diffusion(kind):
    from diffusers import UNet2DConditionModel

    from fisedit.models.families.family import SD1

    shapes = full_size()[kind]
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(SD1.configs / "unet"))
    adapter = checkpoints._empty(variants.family_of({}, shapes, KEYS), shapes, {}, KEYS)
    check_fit(adapter, unet)
    unet.register_to_config(cross_attention_dim=1024)
    with pytest.raises(AdapterError, match="text of width 768, got 1024"):
        check_fit(adapter, unet)


def others() -> list[str]:
    return [] if not KEYS.is_file() else [k for k in json.loads(KEYS.read_text()) if k not in PUBLISHED]


@pytest.mark.parametrize("kind", others())
def test_every_other_published_part_is_refused_by_name(kind, tmp_path):
    shapes, name = full_size()[kind], kind.partition("(")[0]
    small = {key: torch.zeros(1) for key in shapes}
    save_file(small, tmp_path / f"{checkpoints.STEM}.safetensors")
    with pytest.raises(AdapterError, match=r"adapter must be a reference adapter .* got (a|tensors)"):
        load_adapter(tmp_path / f"{checkpoints.STEM}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(AdapterError, match=f"got a {name}"):
        load_adapter(tmp_path)


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k].float(), b[k].float()) for k in a)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("place", ["folder", "one.safetensors"])
def test_saving_and_loading(unet, family, dtype, place, tmp_path):
    adapter = lively(unet, family).to(dtype)
    save_adapter(adapter, tmp_path / place)
    again = load_adapter(tmp_path / place)
    assert again.family is adapter.family
    assert same(again, adapter) and identity(again) == identity(adapter)
    assert {tensor.dtype for tensor in again.state_dict().values()} == {dtype}
    assert [b.row_column.row_attention.heads for b in again.blocks.values()] == [4] * len(again.blocks)
    check_fit(again, unet)


def test_a_loaded_adapter_says_what_it_said_before(unet, tmp_path):
    save_adapter(lively(unet, "v2"), tmp_path / "once")
    save_adapter(load_adapter(tmp_path / "once"), tmp_path / "twice")
    config = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("once", "twice")]
    assert config[0] == config[1]
    assert config[0]["_class_name"] == "HMReferenceAdapter" and config[0]["version"] == "v2"


def stored(unet, family, folder, config=None, **tensors):
    """A folder with an adapter whose configuration and tensors are changed; None takes one away."""
    save_adapter(lively(unet, family), folder)
    weights, described = (
        load_file(folder / f"{checkpoints.STEM}.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    weights = {k: v for k, v in (weights | tensors).items() if v is not None}
    save_file(weights, folder / f"{checkpoints.STEM}.safetensors")
    described = {k: v for k, v in (described | (config or {})).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def test_dead_weights_are_ignored(unet, tmp_path):
    is_unused_tensor = {
        "reference_modules_down.3.norm.weight": torch.ones(5),
        "reference_modules_down.3.pos_embed.pe": torch.ones(1),
    }
    assert same(load_adapter(stored(unet, "v1", tmp_path / "v1", **is_unused_tensor)), lively(unet, "v1"))
    is_unused_tensor = {f"reference_modules_up.{i}.time_emb_proj.weight": torch.ones(4, 1280) for i in range(4)}
    assert same(load_adapter(stored(unet, "v5", tmp_path / "v5", **is_unused_tensor)), lively(unet, "v5"))


def test_a_missing_version_is_the_first(unet, tmp_path):
    config = {"version": None, "_name_or_path": "/somewhere"}
    assert load_adapter(stored(unet, "v1", tmp_path, config)).family.name == "v1"


def test_heads_by_level(unet, tmp_path):
    """Told from the finest down block to the coarsest, as diffusers tells them; up blocks have them in reverse."""
    loaded = load_adapter(stored(unet, "v1", tmp_path, {"num_attention_heads": [1, 2, 4, 8]}))
    heads = {place: block.row_column.row_attention.heads for place, block in loaded.blocks.items()}
    assert heads == {"down_0": 1, "down_1": 2, "down_2": 4, "mid": 8, "up_1": 4, "up_2": 2, "up_3": 1}


REFUSED = {
    "a key is missing": (
        {"reference_modules_up.1.proj.bias": None},
        None,
        r"lacks reference_modules_up\.1\.proj\.bias",
    ),
    "a block is missing": (
        {f"reference_modules_up.1.{k}": None for k in ("norm.weight", "norm.bias")},
        None,
        r"lacks reference_modules_up\.1\.norm\.weight",
    ),
    "a shape is wrong": ({"reference_modules_up.0.proj.bias": torch.ones(3)}, None, r"must be \(64,\), got \(3,\)"),
    "something strange": (
        {"reference_modules_up.0.gate": torch.ones(1)},
        None,
        r"has no reference_modules_up\.0\.gate",
    ),
    "heads that do not divide": ({}, {"num_attention_heads": 7}, "num_attention_heads must divide"),
    "heads of too few blocks": (
        {},
        {"num_attention_heads": [8]},
        "num_attention_heads must be a number, or one of each",
    ),
    "heads that are no numbers": ({}, {"num_attention_heads": 1.5}, "must be a number, or one of each block"),
    "another class": ({}, {"_class_name": "ControlNetModel"}, "got a ControlNetModel"),
    "another version": (
        {},
        {"_class_name": "HMReferenceAdapter", "version": "v9"},
        "version must be v1 or v2, got 'v9'",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_fit_is_refused(unet, why, tmp_path):
    tensors, config, message = REFUSED[why]
    with pytest.raises(AdapterError, match=message) as refused:
        load_adapter(stored(unet, "v3", tmp_path, config, **tensors))
    assert "\n" not in str(refused.value)


def test_nan_is_refused(unet, tmp_path):
    with pytest.raises(NumericsError, match=r"reference_modules_up\.0\.proj\.bias holds NaN"):
        load_adapter(stored(unet, "v3", tmp_path, **{"reference_modules_up.0.proj.bias": torch.full((64,), torch.nan)}))


def test_damaged_and_unsafe_files_are_refused(unet, tmp_path):
    save_adapter(lively(unet, "v3"), tmp_path / "a.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:5000])
    torch.save({}, tmp_path / "a.bin")
    (tmp_path / "disguised.safetensors").write_bytes((tmp_path / "a.bin").read_bytes())
    (tmp_path / "empty").mkdir()
    for name, message in {
        "cut.safetensors": "truncated or damaged",
        "a.bin": "must be .safetensors",
        "disguised.safetensors": "must be .safetensors",
        "empty": "lacks its weights",
        "nowhere/at/all": "not there",
    }.items():
        with pytest.raises(AdapterError, match=message) as refused:
            load_adapter(tmp_path / name)
        assert "\n" not in str(refused.value)


def test_another_base_is_refused(pipelines):
    narrow = lively(pipelines["sd15"].unet, "v3")
    with pytest.raises(AdapterError, match="UNet of 3 levels, got one for 4"):
        check_fit(narrow, pipelines["demo"].unet)
    wide = build_pipeline("sd15").unet
    check_fit(narrow, wide)
    wide.register_to_config(cross_attention_dim=99)
    with pytest.raises(AdapterError, match="text of width 32, got 99"):
        check_fit(narrow, wide)
    with pytest.raises(AdapterError, match="48 channels at up_0, got 64"):
        check_fit(lively(pipelines["shallow"].unet, "v3", heads=4), pipelines["demo"].unet)


def test_families_have_names(unet):
    with pytest.raises(AdapterError, match="family must be one of v1, v2, v3, v5, v5b, full, got 'v7'"):
        fresh_adapter(unet, "v7")


def test_a_hub_id_is_fetched_by_the_hubs_own_client(unet, tmp_path, monkeypatch):
    """The configuration first, and weights only for a kind that is ours."""
    asked = []
    save_adapter(lively(unet, "v3"), tmp_path)
    monkeypatch.setattr(
        paths, "download_files", lambda *told, local_files_only: asked.append((*told, local_files_only)) or tmp_path
    )
    monkeypatch.chdir(tmp_path)
    assert load_adapter("songkey/hm3_reference", local_files_only=True).family.name == "v3"
    assert asked == [
        ("songkey/hm3_reference", ["config.json"], True),
        ("songkey/hm3_reference", ["config.json", "*.safetensors"], True),
    ]
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "HMControlNet"}))
    with pytest.raises(AdapterError, match="got a HMControlNet"):
        load_adapter("songkey/hm_control")
    assert len(asked) == 3


@pytest.mark.parametrize("kind", ["folder", "single file"])
def test_another_base(adapter, place, kind, tmp_path, monkeypatch):
    pipe = build_pipeline("sd15", seed=5)
    folder = tmp_path / "model"
    pipe.save_pretrained(folder)
    if kind == "single file":
        monkeypatch.setattr(families, "CONFIGS", tmp_path)
        shutil.copytree(folder, tmp_path / "sd15", ignore=shutil.ignore_patterns("*.safetensors"))
        folder = save_single_file(pipe, tmp_path / "model.safetensors")
    editor = Editor.from_pretrained(folder, dtype="fp32", device="cpu")
    editor.load_adapter(place)
    check_guided(editor, pipe, adapter)


def test_another_autoencoder(pipelines, adapter, place, tmp_path):
    """It is the one that reads references."""
    pipe, other = build_pipeline("sd15"), build_pipeline("sd15", seed=9).vae
    pipe.save_pretrained(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "vae")
    other.save_pretrained(tmp_path / "model" / "vae")
    editor = Editor.from_pretrained(tmp_path / "model", dtype="fp32", device="cpu")
    editor.load_adapter(place)
    pipe.vae = other
    swapped = check_guided(editor, pipe, adapter)
    first = Editor(pipelines["sd15"])
    first.load_adapter(place)
    plain = first.generate(CAT, reference=RED, width=128, height=128, **QUICK)
    assert oracle.deviation(*(e._trajectory_cache.get("0")[0].latents[-1] for e in (editor, first))) > 0.01
    assert not np.array_equal(pixels(swapped), pixels(plain))
