"""The tables of OpenAI's fields, against what PyPI's client can send."""

from __future__ import annotations

from typing import get_type_hints

import pytest
from openai.types import image_edit_params, image_generate_params

from app.openai_fields import EDITS, GENERATIONS
from fisedit.errors import InputError


@pytest.mark.parametrize(
    ("table", "types"),
    [
        (EDITS, image_edit_params.ImageEditParamsStreaming),
        (GENERATIONS, image_generate_params.ImageGenerateParamsStreaming),
    ],
)
def test_every_field_of_the_client_is_known(table, types):
    assert get_type_hints(types).keys() <= table.fields.keys()


def test_what_changes_the_answer_is_refused_or_told():
    with pytest.raises(InputError, match="background is not supported, got 'transparent'"):
        GENERATIONS.notes_on({"background": "transparent"})
    with pytest.raises(InputError, match="markup is not supported"):
        EDITS.notes_on({"markup": "a file"})
    asked = {"quality": "high", "style": "vivid", "stream": True, "partial_images": 2, "negative_prompt": "snow"}
    told = [note.partition(" ")[0] for note in GENERATIONS.notes_on(asked)]
    assert told == ["quality", "style", "partial_images", "negative_prompt"]
    open_webui = {"model": "gpt-image-1", "prompt": "a cat", "n": 1, "size": "512x512", "response_format": "b64_json"}
    assert GENERATIONS.notes_on(open_webui) == EDITS.notes_on(open_webui | {"background": "auto"}) == ()
