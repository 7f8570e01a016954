"""Words of WordNet's classes, by what stands around them."""

from __future__ import annotations

import pytest

from fisedit.prompts.noun_classes import classes_of
from fisedit.prompts.text_diff import diff
from fisedit.values import EditKind
from training.tokens import build_tokenizer

TOKENIZER = build_tokenizer()


def test_classes_of_names():
    assert "place" in classes_of(["old", "bowling", "alleys"])
    assert classes_of(["suitcases"]) == {"thing"} and classes_of(["drizzly"]) == {"adjective", "weather"}
    assert classes_of(["xyzzy"]) == frozenset()


@pytest.mark.parametrize(
    ("source_prompt", "prompt", "reason"),
    [
        ("a cat", "a cat in a courthouse", "changes the scene"),  # a place all around
        ("a cat", "a cat in a basket", ""),  # and a container
        ("a lawn", "a dog on a lawn", ""),  # the lawn was there
        ("a lawn", "a lawn with a dog in a kennel", ""),  # where the dog is, not the picture
        ("a cat", "a cat during a gale", "changes the scene"),
        ("a ford", "a ford in the 1930s", "changes the scene"),
        ("a cat", "an engraved gouache of a cat", "changes the medium"),
        ("a slice of a pie", "a piece of a pie", ""),
        ("a cat", "a cat, dadaist", "changes the style"),
        ("a cat", "a cat, red bandana", ""),
        ("a town hall interior", "a romanesque town hall interior", "changes the style"),
        ("a mirror", "a romanesque mirror", ""),  # modifies a thing
        ("a cat", "a cat in the manner of someone", "names a style"),
    ],
)
def test_what_stands_around_decides(source_prompt, prompt, reason):
    script = diff(source_prompt, prompt, TOKENIZER)
    assert script.reason.endswith(reason) and (script.kind is EditKind.GLOBAL) is bool(reason), script.reason
