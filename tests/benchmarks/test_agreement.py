"""The measure of artefacts beside verdicts: edits made again, and the counts."""

from __future__ import annotations

import json

import pytest

from benchmarks import agreement
from benchmarks.quality.scene_edits import available_kinds, single_token_words
from fisedit.bench.settings import EvaluationSettings
from tests.support.quality import needs_font

VERDICT_WORDS = {"clean", "faint", "visible", "bad"}


@pytest.fixture
def judged(tmp_path):
    """Two sets of verdicts, of which one has those of two methods."""
    first = {"fisedit": {"0": ["clean"], "3": ["bad", "a reason"]}, "erase": {"3": ["faint", "another"]}}
    sets = [
        {"name": "one", "seed": 5, "edits": 4, "kinds": ["swap", "recolour", "insert", "delete"], "verdicts": first},
        {"name": "two", "seed": 6, "edits": 1, "kinds": ["background"], "verdicts": {"fisedit": {"0": ["visible"]}}},
    ]
    path = tmp_path / "verdicts.json"
    path.write_text(json.dumps({"sets": sets}), encoding="utf-8")
    return path


@needs_font
def test_judged_edits_are_made_again(monkeypatch, spoken_pipe, judge, judged):
    monkeypatch.setattr(agreement, "load", lambda *_, **__: spoken_pipe)
    monkeypatch.setattr(agreement, "find_classifier", lambda *_: (judge, ()))
    told = agreement.measure_agreement(EvaluationSettings(num_inference_steps=2), None, judged)
    rows = told["rows"]
    assert [(row["set"], row["edit"], row["kind"], row["method"], row["person"]) for row in rows] == [
        ("one", 0, "swap", "fisedit", "clean"),
        ("one", 3, "delete", "fisedit", "bad"),
        ("one", 3, "delete", "erase", "faint"),
        ("two", 0, "background", "fisedit", "visible"),
    ]
    assert [row["truth"] for row in rows] == [True, True, True, False]
    assert all(("smear" in row["strengths"]) is row["truth"] and row["measure"] in VERDICT_WORDS for row in rows)
    assert [(row["set"], row["truth"], row["edits"]) for row in told["summary"]] == [
        ("one", True, 3),
        ("two", False, 1),
    ]
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_pairs_are_counted_by_what_is_seen():
    said = [("visible", "bad"), ("bad", "faint"), ("clean", "faint"), ("faint", "visible"), ("faint", "clean")]
    rows = [{"set": "one", "truth": True, "person": person, "measure": measure} for person, measure in said]
    (row,) = agreement._summary(rows)
    assert row == {
        "set": "one",
        "truth": True,
        "edits": 5,
        "agree": 3,
        "seen, seen": 1,
        "seen, not": 1,
        "not, seen": 1,
        "not, not": 2,
    }


@needs_font
def test_every_shipped_verdict_is_of_an_edit_that_can_be_made():
    from training.tokens import build_tokenizer

    kinds = available_kinds(single_token_words(build_tokenizer()))
    for judged in json.loads(agreement.VERDICTS.read_text(encoding="utf-8"))["sets"]:
        assert set(judged["kinds"]) <= set(kinds)
        for by_edit in judged["verdicts"].values():
            assert {verdict[0] for verdict in by_edit.values()} <= VERDICT_WORDS
            assert all(0 <= int(i) < judged["edits"] for i in by_edit)


def test_the_command_measures_by_twenty_steps(study, monkeypatch, tmp_path):
    asked = []
    told = {"summary": [{"set": "one", "agree": 3}], "notes": ["a note"]}
    monkeypatch.setattr(agreement, "measure_agreement", lambda settings, _: asked.append(settings) or told)
    run = study("agreement", "--dtype", "fp32", "--output", tmp_path / "report.json")
    assert run.status == 0 and asked == [EvaluationSettings(num_inference_steps=20, dtype="fp32")]
    assert "note: a note" in run.out
    assert json.loads((tmp_path / "report.json").read_text())["summary"] == told["summary"]
