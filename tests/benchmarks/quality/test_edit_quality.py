"""Whole runs of `benchmarks.quality`."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from PIL import Image

from benchmarks.quality import edit_quality
from benchmarks.quality.methods import METHODS
from benchmarks.settings import EditQualitySettings
from fisedit.errors import Cancelled, InputError, ModelError
from tests.support.quality import needs_font


@pytest.fixture
def loaded(monkeypatch, spoken_pipe):
    monkeypatch.setattr(edit_quality, "load", lambda *_, **__: spoken_pipe)


KEYS = ["settings", "notes", "summary", "classes", "artefacts", "whole", "misjudged", "rows", "edits"]


@needs_font
def test_two_edits_by_all_methods(loaded, judge_file, tmp_path):
    steps = []
    settings = EditQualitySettings(edits=2, num_inference_steps=3, classifier=judge_file, html=tmp_path)
    told = edit_quality.measure_edit_quality(settings, lambda i, n, _: steps.append((i, n)))
    assert list(told) == KEYS and steps == [(0, 2), (1, 2)]
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    of_all_kinds = [name for name in METHODS if name not in ("erase", "inpaint-empty")]  # the others are of deletes
    assert [(row["kind"], row["method"]) for row in told["summary"]] == [("in a place", name) for name in of_all_kinds]
    assert told["settings"]["edits"] == 2
    assert all(set(edit["scores"]) == set(METHODS) for edit in told["edits"])
    assert all(type(edit["scores"]["fisedit"]["success"]) is bool for edit in told["edits"])
    assert [row["asked"] for row in told["whole"]] == [
        "words",
        "prompts alone",
        "words and prompts alone",
        "written prompts",
        "as edited",
    ]
    page = ET.fromstring((tmp_path / "report.html").read_text(encoding="utf-8"))
    shown = [Image.open(tmp_path / image.get("src")).size for image in page.iter("img")]
    assert len(shown) == 2 and all(width > 10 * height / 2 for width, height in shown)
    assert len(page.findall(".//table")) == 5
    assert {row["method"] for row in told["artefacts"]} == {*of_all_kinds} - {
        "no-edit",
        "resampled",
        "resampled-unguided",
    }
    assert {"edits", "any", "smear", "trace", "missing"} <= set(told["artefacts"][0])


@needs_font
def test_edits_of_one_kind(loaded, judge_file):
    settings = EditQualitySettings(
        edits=1, num_inference_steps=3, classifier=judge_file, kinds=("delete",), methods=("erase", "inpaint-empty")
    )
    told = edit_quality.measure_edit_quality(settings)
    (edit,) = told["edits"]
    assert edit["kind"] == "delete" and told["settings"]["kinds"] == ["delete"]
    for score in edit["scores"].values():
        assert type(score["gone"]) is bool and score["truth_psnr"] > 0
    assert {"gone", "truth dB"} <= set(told["summary"][0])
    with pytest.raises(InputError, match=r"kinds must be of .*delete.*, got vanish"):
        edit_quality.measure_edit_quality(replace(settings, kinds=("vanish",)))


@needs_font
def test_runs_repeat_and_need_no_judge(loaded, monkeypatch, tmp_path):
    monkeypatch.setattr(edit_quality, "demo_folder", lambda: tmp_path)
    settings = EditQualitySettings(edits=1, num_inference_steps=2, methods=("reprompt",))
    first, again = (edit_quality.measure_edit_quality(settings) for _ in range(2))
    assert first == again
    assert first["edits"][0]["scores"]["reprompt"]["success"] is None and first["classes"] == []
    assert "success is not measured: there is no judge.safetensors" in first["notes"][0]


@needs_font
def test_a_stopped_run_goes_on_from_its_journal(loaded, judge_file, tmp_path):
    def stop(i, n, preview):
        if i:
            raise Cancelled

    steps, kept = [], tmp_path / "kept.jsonl"
    methods = ("fisedit", "diffedit", "reprompt")
    plain = EditQualitySettings(edits=2, num_inference_steps=2, methods=methods, classifier=judge_file)
    logged, measure = replace(plain, results_log=kept), edit_quality.measure_edit_quality
    with pytest.raises(Cancelled):
        measure(logged, stop)
    told = measure(logged, lambda i, n, _: steps.append(i))
    assert steps == [1] and told == measure(plain)
    assert measure(logged, lambda i, n, _: steps.append(i)) == told and steps == [1]
    with pytest.raises(InputError, match="other settings"):
        measure(replace(logged, seed=1))


def test_a_judge_that_was_named_must_be_there(tmp_path):
    with pytest.raises(ModelError, match="classifier"):
        edit_quality.measure_edit_quality(EditQualitySettings(edits=1, classifier=tmp_path / "none.safetensors"))


def test_pie_bench_by_two_methods(loaded, dataset):
    methods = ("fisedit-given", "no-edit")
    settings = EditQualitySettings(edits=5, num_inference_steps=2, methods=methods, pie_bench=dataset)
    told = edit_quality.measure_edit_quality(settings)
    (edit,) = told["edits"]
    given, kept = (edit["scores"][name] for name in ("fisedit-given", "no-edit"))
    assert (edit["kind"], edit["whole"], given["success"]) == ("change object", None, None)
    assert given["exact"] and given["published"]["psnr"] > kept["published"]["psnr"] > 0
    assert {"PIE PSNR", "PIE MSE", "PIE SSIM"} <= set(told["summary"][0])
    assert [row["asked"] for row in told["whole"]] == ["written prompts"]
    assert any("LPIPS" in note for note in told["notes"]) and any("scaled from 512" in note for note in told["notes"])


def test_the_command_hands_everything_on(study, monkeypatch, tmp_path):
    told = {"summary": [{"method": "fisedit", "IoU": "0.9 (0.8)"}], "classes": [], "whole": [], "notes": ["a note"]}
    asked = []
    monkeypatch.setattr(edit_quality, "measure_edit_quality", lambda settings, _: asked.append(settings) or told)
    arguments = [
        "--edits",
        "3",
        "--methods",
        "fisedit, reprompt",
        "--seed",
        "5",
        "--html",
        str(tmp_path),
    ]
    run = study("quality", *arguments, "--output", tmp_path / "report.json")
    assert run.status == 0
    assert asked == [EditQualitySettings(edits=3, methods=("fisedit", "reprompt"), seed=5, html=tmp_path)]
    assert (asked[0].classifier, asked[0].guidance_scale) == (None, 4.0)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written.pop("environment") and written == told
    assert "0.9 (0.8)" in (said := run.out) and "note: a note" in said
