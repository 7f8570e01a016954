"""What a prompt has and the encoder cannot read is told."""

from __future__ import annotations

from fisedit.sampling.engine import Engine
from fisedit.sampling.prompt_encoding import encode_prompts
from tests.support.edits import config_of
from tests.support.pipelines import build_pipeline


def test_notes():
    engine = Engine(build_pipeline("shallow"))

    def notes(prompt, regional=(), **settings):
        config = config_of(prompt, **settings)
        return [note.partition(", ")[0] for note in encode_prompts(engine.pipe, engine.encode, config, regional).notes]

    assert notes("a (cat:1.2)", guidance_scale=0.0) == notes("a cat", guidance_scale=1.0) == []
    assert notes("a cat (12:30)", guidance_scale=0.5) == [
        "guidance_scale 0.5 is no guidance",
        "the prompt has (12:30)",
    ]
    told = notes("a cat", ["a {dog}"], negative_prompt="a dog++", guidance_scale=5.0)
    assert told == ["the prompt 'a {dog}' has {dog}", "the negative prompt has dog++"]
