"""`fisedit validate`: rules are checked on the model itself, a stopped run goes on, nothing private is told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fisedit.bench import metrics
from fisedit.bench import validation as model_validation
from fisedit.bench.settings import ValidationSettings
from fisedit.bench.validation import QUICK_EDITS, validate_model
from fisedit.bench.validation_report import check_rows, summary_rows
from fisedit.errors import InputError, ModelError
from tests.support.inpainting import inpainting
from tests.support.quality import grey, picture

QUICK = {"quick": True, "compiled": False, "num_inference_steps": 2, "dtype": "fp32", "local_files_only": True}


def edit_row(**changes: object) -> dict[str, object]:
    row = {"kind": "swap", "unchanged": True, "exact": True, "area": 0.2, "fallback": "", "covered": 0.9, "psnr": 30.0}
    return row | {"ssim": 0.9, "macs_ratio": 2.0, "prompt": "b", "source_prompt": "a"} | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a quick run over the demo model, stopped once in its middle."""
    folder = tmp_path_factory.mktemp("validation")
    calls: list[int] = []

    def stop(i: int, n: int, _: object) -> None:
        calls.append(i)
        if i == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        validate_model(ValidationSettings(**QUICK), folder, stop)
    assert calls == [0, 1, 2, 3] and not (folder / "report.html").exists()
    return folder


def test_a_stopped_run_goes_on(folder, monkeypatch):
    assert list(json.loads((folder / "report.json").read_text())["found"]) == ["speed", "all rows active", "edit 0"]
    monkeypatch.setattr(model_validation, "seconds_by_round", None)  # what was timed is not timed again
    report = validate_model(ValidationSettings(**QUICK), folder)
    assert report["passed"] and [row["held"] for row in report["checks"]] == [True] * 3
    assert len(report["edits"]) == len(QUICK_EDITS)
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report))


def test_the_rules_hold_for_stable_diffusion_xl(pipelines, tmp_path):
    """Those of two text encoders, beside diffusers' pipeline of that family."""
    pipelines["sdxl"].save_pretrained(tmp_path / "model")
    report = validate_model(ValidationSettings(**QUICK, model=str(tmp_path / "model"), size=64), tmp_path / "found")
    assert report["passed"] and [row["held"] for row in report["checks"]] == [True] * 3
    assert any("of UNets that read text alone" in row["seconds"] for row in report["speed"])


def test_the_page_shows_every_edit_and_tells_nothing_private(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    names = [path.name for path in sorted((folder / "pictures").iterdir())]
    assert "DeepCache, interval 3" in page and "OpenVINO, fp32" in page
    assert len(names) == len(QUICK_EDITS) and all(f'src="pictures/{name}"' in page for name in names)
    for text in (page, (folder / "report.json").read_text(encoding="utf-8")):
        assert str(folder) not in text and str(Path.home()) + "/" not in text and str(Path.cwd()) not in text


def test_other_settings_are_refused(folder):
    with pytest.raises(InputError, match="other settings; name another folder"):
        validate_model(ValidationSettings(**QUICK | {"num_inference_steps": 3}), folder)


def test_results_of_other_code_are_refused(folder, tmp_path):
    report = json.loads((folder / "report.json").read_text())
    now = report["environment"]
    for earlier in ({"commit": "1234567890"}, {"versions": now["versions"] | {"fisedit": "0.0.1"}}):
        report["environment"] = now | earlier
        (tmp_path / "report.json").write_text(json.dumps(report))
        with pytest.raises(InputError, match=r"is of fisedit 0\..*, this is fisedit 0\..*; name another folder"):
            validate_model(ValidationSettings(**QUICK), tmp_path)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"size": 100}, "width must be divisible by 8, got 100; use 96"),
        ({"size": 0}, r"width must be a whole number in \[64, 2048\], got 0"),
        ({"num_inference_steps": 0}, r"num_inference_steps must be a whole number in \[1, 999\], got 0"),
        ({"guidance_scale": math.nan}, r"guidance_scale must be in \[0, 100\], got nan"),
    ],
)
def test_settings_out_of_range_are_refused_before_the_model_is_loaded(changes, line, tmp_path, monkeypatch):
    monkeypatch.setattr(model_validation, "load", None)
    with pytest.raises(InputError, match=line):
        validate_model(ValidationSettings(**QUICK | changes), tmp_path)


def test_an_inpainting_model_is_refused_before_anything_runs(pipelines, tmp_path, monkeypatch):
    monkeypatch.setattr(model_validation, "load", lambda *_, **__: inpainting(pipelines["shallow"]))
    with pytest.raises(ModelError, match="got an inpainting model"):
        validate_model(ValidationSettings(**QUICK), tmp_path, lambda *_: pytest.fail("a part ran"))


def test_a_file_that_is_no_report_is_refused(tmp_path):
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(InputError, match="is no report of fisedit validate"):
        validate_model(ValidationSettings(**QUICK), tmp_path)


def test_sd15s_architecture_holds_the_rules(pipelines, tmp_path, monkeypatch):
    monkeypatch.setattr(model_validation, "load", lambda *_, **__: pipelines["sd15"])
    monkeypatch.setattr(model_validation, "QUICK_EDITS", (0,))
    report = validate_model(ValidationSettings(**QUICK, size=128), tmp_path)
    assert report["passed"], report["checks"]


def test_a_rule_that_does_not_hold_fails_the_run():
    rows = check_rows(2e-4, 1e-4, [edit_row(), edit_row(unchanged=False), edit_row(exact=False), edit_row(exact=None)])
    assert [(row["held"], row["seen"]) for row in rows] == [(False, "2.0e-04"), (False, "3 of 4"), (False, "2 of 3")]


def test_the_command_fails_where_a_rule_does(fisedit, monkeypatch):
    monkeypatch.setattr(
        model_validation,
        "validate_model",
        lambda *_: {"passed": False} | {n: [{"a": 1}] for n in ("checks", "summary", "speed")},
    )
    run = fisedit("validate", "demo", "--quick", "--output", "out")
    assert run.status == 1 and run.err.startswith("error[check]: a check failed")


def test_the_summary_has_every_kind():
    rows = summary_rows([edit_row(), edit_row(kind="global", fallback="global", psnr=None, ssim=None, area=1.0)])
    assert [(row["kind"], row["edits"], row["ran dense"], row["PSNR"]) for row in rows] == [
        ("swap", 1, 0, "30.0 dB"),
        ("global", 1, 1, ""),
        ("all", 2, 1, "30.0 dB"),
    ]


class TestMetrics:
    def test_ssim_is_one_for_equal_pictures_and_less_where_they_differ(self):
        rng = np.random.default_rng(0)
        noisy = picture(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        everywhere, left = np.ones((16, 16), bool), np.zeros((16, 16), bool)
        left[:, :4] = True
        assert metrics.ssim(noisy, noisy, everywhere) == pytest.approx(1)
        changed = np.asarray(noisy).copy()
        changed[:, 12:] = 0
        assert metrics.ssim(picture(changed), noisy, left) == pytest.approx(1)
        assert metrics.ssim(picture(changed), noisy, ~left) < 0.9

    def test_change_covered_is_the_share_inside(self):
        after = grey(100)
        after[:4] = 120
        after[12:] = 110
        inside = np.zeros((16, 16), bool)
        inside[:4] = True
        assert metrics.change_covered(picture(grey(100)), picture(after), inside) == pytest.approx(400 / 500)
        assert metrics.change_covered(picture(after), picture(after), inside) == 1
