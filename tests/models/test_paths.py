"""Where models are found: what the hub refuses is one line, and a model's digest follows its files."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError

from fisedit.errors import ModelError
from fisedit.models import paths

NAME = "owner/model"


@pytest.fixture
def hub(monkeypatch):
    """Lets the hub answer every request with an error or a folder."""

    def answer(with_: object) -> None:
        def download(*_: object, **__: object) -> str:
            if isinstance(with_, Exception):
                raise with_
            return str(with_)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return answer


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("403 Client Error\nfor url"), "does not give model owner/model (403 Client Error); check the name"),
        (HFValidationError("not a name"), "does not give model owner/model (not a name)"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, error, line):
    hub(error)
    with pytest.raises(ModelError) as caught:
        paths.download_files(NAME, ["*.json"], local_files_only=False)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_home_folder_is_asked_for_only_where_there_is_none(hub, monkeypatch):
    hub(RuntimeError("Could not determine home directory."))
    with pytest.raises(RuntimeError, match="home directory"):
        paths.download_files(NAME, [], local_files_only=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ModelError, match="got no home folder; set HF_HOME to a folder"):
        paths.download_files(NAME, [], local_files_only=False)


def test_a_path_stays_as_it_is_where_no_home_folder_is_known(monkeypatch):
    assert paths.expand_home("~/m") == Path.home() / "m"

    def unknown(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    assert paths.expand_home("~/m") == Path("~/m")


def test_the_digest_of_a_hub_model_is_its_commit(hub, tmp_path):
    hub(tmp_path / "snapshots/0a1b2c")
    assert paths.model_digest(NAME) == "owner/model@0a1b2c"


def test_the_digest_of_a_folder_is_that_of_what_a_loader_reads(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = paths.model_digest(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"none")
    assert paths.model_digest(tmp_path) == before
    (tmp_path / "config.json").write_text("[]")
    assert paths.model_digest(tmp_path) != before
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere.json")
    with pytest.raises(ModelError, match=r"must be readable, got .*gone\.json \(No such file or directory\)"):
        paths.model_digest(tmp_path)
