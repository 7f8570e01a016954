"""Pictures for programs: each edit is of the picture that was sent, and what is finished is never lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from app import program_pictures, runs
from app.program_pictures import ProgramPictures
from app.sessions import AppState
from app.validation import RegionSettings, SourceSettings
from fisedit.errors import Cancelled, InputError, PromptError
from tests.support.app.requests import CAT, DOG, FOX

QUICK = SourceSettings(steps=3, seed=7, width=64, height=64)
LEFT = RegionSettings(add=Image.fromarray(np.uint8([[255] * 32 + [0] * 32] * 64)), only=True)
TOP = RegionSettings(add=Image.fromarray(np.uint8([[255] * 64] * 32 + [[0] * 64] * 32)), only=True)


@pytest.fixture
def pictures(state) -> ProgramPictures:
    return ProgramPictures(state)


def shown(picture: program_pictures.ProgramPicture) -> bytes:
    return Image.open(BytesIO(picture.data)).convert("RGB").tobytes()


def test_edits_at_once_are_of_the_pictures_that_were_sent(pictures):
    (cat,) = pictures.generate(CAT, [QUICK])
    (dog,) = pictures.edit(cat.data, DOG, [QUICK], LEFT)
    asked = [(cat.data, FOX), (dog.data, FOX), (cat.data, "a bird and a cake on a beach"), (dog.data, CAT)]
    # TOP leaves half of what tells cat from dog; within LEFT the edits of both to FOX are one picture in float32
    alone = [shown(pictures.edit(data, prompt, [QUICK], TOP)[0]) for data, prompt in asked]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda each: shown(pictures.edit(*each, [QUICK], TOP)[0]), asked))
    assert together == alone and len(set(alone)) == 4


def test_a_picture_is_edited_without_end(pictures, monkeypatch):
    for module in (program_pictures, runs):
        monkeypatch.setattr(module, "MAX_RESULTS", 3)
    (cat,) = pictures.generate(CAT, [QUICK])
    first = shown(pictures.edit(cat.data, DOG, [QUICK], LEFT)[0])
    for prompt in (FOX, "a bird and a cake on a beach", "a sheep and a cake on a beach"):
        pictures.edit(cat.data, prompt, [QUICK], LEFT)
    assert shown(pictures.edit(cat.data, DOG, [QUICK], LEFT)[0]) == first
    latest = cat
    for prompt in (DOG, FOX, DOG, FOX):  # a lineage that fills the session: opened anew, with what it shows
        (latest,) = pictures.edit(latest.data, prompt, [QUICK], LEFT)
    assert latest.config.prompt == FOX


def test_an_interrupted_request_answers_what_is_finished(pictures, monkeypatch):
    really, begun = program_pictures.handlers.generate, []

    def generate(*given):
        begun.append(given)
        if len(begun) == 2:
            pictures.interrupt()
        return really(*given)

    monkeypatch.setattr(program_pictures.handlers, "generate", generate)
    all_settings = [replace(QUICK, seed=seed) for seed in range(3)]
    assert [one.config.seed for one in pictures.generate(CAT, all_settings)] == [0, 1] and len(begun) == 2
    request = program_pictures._ProgramRequest()
    request.stop()
    with pytest.raises(Cancelled):
        request.collect(lambda _: pytest.fail("it was stopped before"), all_settings)


def test_bad_arguments_are_told_before_any_work(pictures, state):
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    data = file.getvalue()
    with pytest.raises(PromptError):
        pictures.edit(data, "", [QUICK], LEFT)
    with pytest.raises(InputError, match="quality must be"):
        pictures.edit(data, DOG, [QUICK], replace(LEFT, quality="best"))
    (cat,) = pictures.generate(CAT, [QUICK])
    with pytest.raises(InputError, match="steps must be"):
        pictures.edit(cat.data, DOG, [replace(QUICK, steps=9999)], LEFT)
    with pytest.raises(InputError, match="model must be"):
        pictures.edit(cat.data, DOG, [replace(QUICK, model="nowhere")], LEFT)
    assert len(state) == 1


def test_sessions_of_programs_end_with_their_pictures(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(program_pictures, "MAX_KNOWN", 2)
    state = AppState(shared.pool, shared.worker, folder=tmp_path / "kept")
    pictures = ProgramPictures(state)
    (cat,) = pictures.generate(CAT, [QUICK])
    pictures.edit(cat.data, DOG, [QUICK], LEFT)
    folder = state.program_session(pictures._keys.copy().popitem()[1]).folder
    assert list(folder.glob("*.png")) and not list((tmp_path / "kept").iterdir())
    for seed in (1, 2):
        pictures.generate(CAT, [replace(QUICK, seed=seed)])
    assert not folder.exists() and len(state) == 2
