"""Files for download and upload: pictures, saved sessions, and what is not believed of them."""

from __future__ import annotations

import errno
import io
import json
import zipfile

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from app import archive, export, handlers
from app.validation import SourceSettings
from fisedit import Editor
from fisedit.errors import FisEditError, InputError
from fisedit.sessions.index import encode_index
from tests.support.app.requests import CAT, DOG, FOX, last, made, png
from tests.support.edits import same


def test_a_picture_tells_its_settings(state, session):
    made(state, session)
    result = last(handlers.edit(state, session, DOG))
    path = export.picture_file(session)
    assert path.is_relative_to(session.out)
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image), np.asarray(result.image))
    found = export.restore_settings(state, path.read_bytes())
    assert found.prompt == DOG
    assert found.settings == SourceSettings(4, 4.0, 7, 128, 128, "ddim", "", "demo")
    bare = export.restore_settings(state, png(result.image))
    assert (bare.prompt, bare.settings) == ("", None)


def test_a_picture_without_words_tells_its_settings(state, session):
    data = png(Image.new("RGB", (128, 128), "teal"))
    last(handlers.open_picture(state, session, data, "", SourceSettings(steps=2)))
    found = export.restore_settings(state, export.picture_bytes(session, session.current))
    assert found.prompt == "" and found.settings is not None and found.settings.steps == 2


def test_of_another_programs_picture_prompt_and_settings_are_restored(state):
    def restored(settings):
        told = PngInfo()
        told.add_text("parameters", f"a cat on a beach\nNegative prompt: rain\n{settings}")
        return export.restore_settings(state, png(Image.new("RGB", (64, 64)), pnginfo=told))

    found = restored(
        "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 1, Size: 64x128, Model: x"
    )
    assert found.prompt == "a cat on a beach"
    assert found.settings == SourceSettings(20, 7.0, 1, 64, 128, "dpmsolver++_karras", "rain")
    found = restored("Steps: 9999, Sampler: Euler a, Size: 1024x2048")
    assert found.prompt == "a cat on a beach"
    assert found.settings == SourceSettings(scheduler="euler_a", negative_prompt="rain", width=1024)
    assert "Not used: steps must be" in found.message and "height must be" in found.message


@pytest.mark.slow
def test_a_session_is_downloaded_and_taken_up_by_another(state, session):
    made(state, session)
    dog = last(handlers.edit(state, session, DOG))
    packed = export.export_session(session)
    assert packed.is_relative_to(session.out)
    other = state.session("other")
    assert same(export.import_session(state, other, packed.read_bytes()), dog)
    assert [result.prompt for result in other.history] == [CAT, DOG]
    assert same(last(handlers.edit(state, other, FOX)), last(handlers.edit(state, session, FOX)))


def test_an_archive_names_no_place_on_this_machine(state, session, tmp_path):
    made(state, session)
    session.models["0"] = str(tmp_path / "my-model")
    with zipfile.ZipFile(export.export_session(session)) as packed:
        assert json.loads(packed.read("session.json"))["model"] == "./my-model"
        assert str(tmp_path) not in "".join(packed.read(name).decode("latin-1") for name in packed.namelist())


def test_an_archive_brings_no_adapter(state, session, tmp_path, monkeypatch):
    made(state, session)
    told = io.BytesIO()
    with zipfile.ZipFile(export.export_session(session)) as packed, zipfile.ZipFile(told, "w") as changed:
        for name in packed.namelist():
            data = packed.read(name)
            if name == "session.json":
                adapters = [{"source": str(tmp_path / "adapter"), "scale": 1.0}]
                data = encode_index(json.loads(data) | {"adapters": adapters})
            changed.writestr(name, data)
    monkeypatch.setattr(Editor, "load_adapter", lambda *_, **__: pytest.fail("an adapter was loaded"))
    assert export.import_session(state, state.session("other"), told.getvalue()).prompt == CAT


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["../session.json"], "other files"),
        (["/etc/passwd"], "other files"),
        (["session.json", "run.sh"], "other files"),
        (["session.json"], "damaged"),
        ([], "other files"),
    ],
)
def test_a_zip_is_not_believed(state, session, names, why):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for name in names:
            packed.writestr(name, "{}")
    source = made(state, session)
    with pytest.raises(FisEditError, match=why):
        export.import_session(state, session, file.getvalue())
    assert session.current is source and session.idle
    assert {path.name for path in state.folder.iterdir()} == {session.key}


def test_no_zip_unpacks_beyond_its_bound(state, session, monkeypatch):
    from app import archive

    monkeypatch.setattr(archive, "MAX_UNPACKED", 1 << 20)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("session.json", b" " * (2 << 20))
    with pytest.raises(InputError, match="unpacked"):
        export.import_session(state, session, file.getvalue())
    with pytest.raises(InputError, match="something else"):
        export.import_session(state, session, b"PK no zip")


def test_a_full_disk_is_not_taken_for_a_bad_zip(state, session, tmp_path, monkeypatch):
    made(state, session)
    packed, wrote = archive.pack(session.folder), archive.write_bytes
    room = len(zipfile.ZipFile(io.BytesIO(packed)).namelist()) - 1
    written = []

    def full(content, path):
        if len(written) == room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        wrote(content, path)

    monkeypatch.setattr(archive, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        archive.unpack(packed, tmp_path / "there", "demo")
