"""What the README shows works: its Python runs, its commands parse, its links lead somewhere."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command

from fisedit.cli import app
from tests.support.documents import ROOT, blocks
from tests.support.folders import pictures

TEXTS = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "benchmarks/LOG.md",
        "benchmarks/README.md",
        "training/README.md",
        "weights/README.md",
        "weights/demo/README.md",
        "weights/demo-fast/README.md",
        "weights/demo-look/README.md",
        "weights/demo-pose/README.md",
        "integrations/comfyui/README.md",
    )
] + sorted((ROOT / "docs").rglob("*.md"))
FEW = ("--num-inference-steps", "2")


def test_the_python_runs(tmp_path, monkeypatch, capsys):
    code = "\n".join(block for block in blocks("python") if "path/to" not in block)
    assert "Editor.from_pretrained" in code
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert "times less arithmetic" in capsys.readouterr().out
    assert (tmp_path / "dog.png").is_file() and (tmp_path / "session").is_dir()


def commands() -> list[str]:
    lines = "".join(block for text in TEXTS for block in blocks("bash", text.read_text(encoding="utf-8"))).splitlines()
    return [line for line in lines if line.startswith("fisedit ")]


def test_the_commands_parse():
    for line in commands():
        command, words = get_command(app), shlex.split(line)[1:]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        command.make_context("fisedit", words)


@pytest.mark.slow
def test_the_readmes_commands_run(fisedit, tmp_path):
    """In few steps."""
    pictures(tmp_path / "photos", 2)
    (tmp_path / "captions.csv").write_text("file,caption\n0.png,a cat\n1.png,a tree\n")
    lines = [
        shlex.split(line, comments=True)[1:]
        for line in "".join(blocks("bash")).splitlines()
        if line.startswith("fisedit ")
    ]
    for words in lines:
        few = FEW if words[0] in ("generate", "batch") or "--source-prompt" in words else ()
        assert fisedit(*words, *few).status == 0, words
    assert len(lines) == 6 and (tmp_path / "castle.png").is_file() and (tmp_path / "edited" / "report.html").is_file()


def test_links_lead_somewhere():
    for path in TEXTS:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (path.parent / target).exists(), target


def test_it_is_read_in_a_minute():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    assert len((ROOT / "benchmarks/LOG.md").read_text(encoding="utf-8").splitlines()) <= 150
