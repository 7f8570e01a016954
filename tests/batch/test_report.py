"""The page that tells of a batch."""

from __future__ import annotations

from fisedit.storage import files
from tests.support.batches import BEFORE, SAID, arguments, batch
from tests.support.documents import well_formed
from tests.support.folders import picture, pictures, tree

__all__ = ["arguments", "batch"]  # fixtures


def test_a_page_that_cannot_be_written_takes_nothing_with_it(batch, tmp_path, monkeypatch):
    pictures(tmp_path / "in", 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_text", full)
    run = batch("in", "out", *SAID, "--json", "--report", "r.html")
    assert (run.status, run.counts) == (1, {"done": 1}) and len(tree(tmp_path / "out")) == 1
    assert "No space left" in run.err and run.err.count("\n") == 1


def test_the_page_escapes_and_links(batch, tmp_path):
    nasty = "<script>alert(1)</script>"
    picture(tmp_path / "in/a&b #%.png")
    picture(tmp_path / "in/bad'\"<i>.png").write_text("no picture")
    run = batch("in", "out", "--prompt", f"a dog {nasty}", "--source-prompt", BEFORE, "--report", "pages/r.html")
    assert run.status == 1 and well_formed(tmp_path / "pages/r.html") == 2
    text = (tmp_path / "pages/r.html").read_text()
    assert nasty not in text and "<i>" not in text and "&lt;script&gt;" in text
    assert "../in/a%26b%20%23%25.png" in text and "../out/a%26b%20%23%25.png" in text
