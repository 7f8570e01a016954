"""Figures in documents are those of a report, which names the commit that it was measured at."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import document_tables
from fisedit.bench.environment import git

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "benchmarks/README.md", "training/README.md")),
    *sorted(path for folder in ("docs", "weights") for path in (ROOT / folder).rglob("*.md")),
]

_NAMES = (
    "adapters agreement costs drive edit edit_bytes erase fidelity looks masks peak_memory picks quality records tiers"
)
COMMANDS = {f"bench {name}" for name in _NAMES.split()}
"""Commands whose reports documents quote."""

FIELDS = {"command", "commit", "clean", "date", "cpu", "cores", "threads", "dtype"}


def quoted(path: Path) -> set[str]:
    """Names of the reports that a document quotes, in tables or by links."""
    return set(re.findall(r"results/([\w.-]+\.json)", path.read_text(encoding="utf-8")))


def published() -> dict[str, dict]:
    """Reports that documents quote."""
    names = set().union(*map(quoted, DOCUMENTS))
    return {name: json.loads((RESULTS / name).read_text()) for name in sorted(names) if (RESULTS / name).exists()}


def test_tables_are_those_of_the_reports():
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert text == document_tables.fill_tables(text), f"python -m benchmarks.document_tables {path.name}"


def test_reports_say_where_they_were_measured_at_a_clean_commit():
    for name, report in published().items():
        environment = report["environment"]
        assert environment.keys() >= FIELDS and environment["clean"] is True, name
        assert kind(environment["command"]) in COMMANDS, name


def test_every_report_is_quoted():
    texts = "".join(path.read_text(encoding="utf-8") for path in [*DOCUMENTS, ROOT / "benchmarks/LOG.md"])
    assert not [path.name for path in RESULTS.iterdir() if path.name not in texts]


def test_every_commit_that_a_table_names_is_here():
    """A reader can check out the code that a figure is of."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the repository's history is not here (a shallow clone or a source archive)")
    for name, report in published().items():
        commit = report["environment"]["commit"]
        assert git("cat-file", "-e", f"{commit}^{{commit}}") is not None, f"{name} is of a commit that is not here"


def kind(command: str) -> str:
    """Such as "bench edit", of a study too."""
    program, *words = command.split()
    return f"bench {words[1].removeprefix('benchmarks.')}" if program == "python" else " ".join(words[:2])


def test_a_table_is_filled_from_its_report(tmp_path):
    text = "A\n<!-- table a.json summary -->\nold\n<!-- end -->\nB\n"
    assert document_tables.fill_tables(text, tmp_path) == text.replace("old\n", document_tables.MISSING)
    environment = {
        "command": "fisedit bench edit",
        "commit": "0123456789",
        "clean": True,
        "date": "2026-01-02T03:04:05+00:00",
        "cpu": "A CPU",
        "cpu_features": ["amx_bf16"],
        "gpu": "",
        "cores": 2,
        "threads": 1,
        "dtype": "bfloat16",
    }
    report = {"environment": environment, "summary": [{"mask": "square", "step": "2.0x"}]}
    (tmp_path / "a.json").write_text(json.dumps(report))
    filled = document_tables.fill_tables(text, tmp_path)
    assert "| mask | step |\n| --- | --- |\n| square | 2.0x |\n" in filled and "old" not in filled
    assert "`fisedit bench edit`, 2026-01-02, commit `0123456`, A CPU (amx_bf16), 1 of 2 cores, bfloat16." in filled
    assert document_tables.fill_tables(filled, tmp_path) == filled
    report["summary"].append({"mask": "ragged", "step": "1.5x"})
    (tmp_path / "a.json").write_text(json.dumps(report))
    chosen = "<!-- table a.json summary where mask=ragged|none columns step, mask -->\n<!-- end -->\n"
    filled = document_tables.fill_tables(chosen, tmp_path)
    assert "| step | mask |\n| --- | --- |\n| 1.5x | ragged |\n" in filled and "square" not in filled
    assert document_tables.fill_tables(filled, tmp_path) == filled
    with pytest.raises(ValueError, match=r"a\.json must have rows in 'summary' where mask=none"):
        document_tables.fill_tables(chosen.replace("ragged|none", "none"), tmp_path)
    with pytest.raises(ValueError, match=r"columns must be of mask, step, got 'area, '; correct the mark"):
        document_tables.fill_tables(chosen.replace("step, mask", "step, area"), tmp_path)
    report["summary"][1]["step, to plain"] = "3x"
    (tmp_path / "a.json").write_text(json.dumps(report))
    filled = document_tables.fill_tables(chosen.replace("step, mask", "step, step, to plain"), tmp_path)
    assert "| step | step, to plain |\n| --- | --- |\n| 1.5x | 3x |\n" in filled
    del report["summary"][1]["step, to plain"]
    report["environment"] |= {"clean": False, "gpu": "A GPU"}
    (tmp_path / "a.json").write_text(json.dumps(report))
    assert "commit `0123456` with changes that are not committed, A GPU" in document_tables.fill_tables(text, tmp_path)


def test_the_documents_that_are_named_are_filled_in_their_place(tmp_path, monkeypatch):
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    text = next(text for text in texts if document_tables.reports(text))
    document = tmp_path / "a.md"
    document.write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["document_tables", str(document)])
    document_tables.main()
    assert document.read_text(encoding="utf-8") == document_tables.fill_tables(text)
    assert set(document_tables.reports(text)) == set(document_tables.reports(document.read_text(encoding="utf-8")))
