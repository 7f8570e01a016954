"""The documents build as a site without a warning, and what is made from the code is up to date."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import row_diagram
from tests.support.documents import ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_site_builds_without_a_warning(tmp_path):
    built = run("mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site"))
    assert built.returncode == 0, built.stderr
    for page in ("index", "how-it-works", "guides/photograph", "reference/api", "reference/cli", "performance"):
        path = tmp_path / "site" / ("index.html" if page == "index" else f"{page}/index.html")
        assert path.is_file(), page
    assert "Change the current picture to fit a new prompt" in (tmp_path / "site/reference/api/index.html").read_text()


def test_the_command_lines_reference_is_the_commands(tmp_path):
    made = run("typer", "fisedit.cli", "utils", "docs", "--name", "fisedit", "--output", str(tmp_path / "cli.md"))
    assert made.returncode == 0, made.stderr
    kept = ROOT / "docs" / "reference" / "cli.md"
    assert (tmp_path / "cli.md").read_text() == kept.read_text(), "make docs"


def test_the_diagram_is_of_the_planners_rows():
    assert (ROOT / "docs" / "rows.svg").read_text() == row_diagram.draw(), "make docs"
