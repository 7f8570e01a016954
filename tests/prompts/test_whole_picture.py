"""Words of WordNet's classes, by what stands around them."""

from __future__ import annotations

import pytest

from fisedit.prompts.noun_classes import classes_of
from fisedit.prompts.text_diff import background_prompt, diff, removes_objects
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


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a cat", ""),
        ("a photo of a red cat on a beach", "a photo on a beach"),
        ("a pig and a cake in a room in the fog", "in a room in the fog"),
        ("a dog sitting on a bench in a park, watercolor", "in a park watercolor"),
        ("an oil painting of a castle by Van Gogh, highly detailed", "an oil painting by van gogh highly detailed"),
        ("a castle and a palm among sand dunes", "among sand dunes"),
        ("at night, a bear and a blue clock", "at night"),
        ("a man holding an umbrella, it is raining, foggy street", "raining foggy street"),
    ],
)
def test_what_a_prompt_says_of_the_whole_picture(prompt, expected):
    assert background_prompt(diff("", prompt, TOKENIZER), TOKENIZER) == expected


@pytest.mark.parametrize(
    ("source_prompt", "prompt", "things"),
    [
        ("a cat and a cake on a beach", "a cat on a beach", "cake"),
        ("a cat, a dog and a cake", "a cat and a cake", "dog"),
        ("a cat, a dog and a cake", "a cat and a dog", "cake"),  # "and" for "," says nothing of the dog
        ("a penguin wearing a hat", "a penguin", "hat"),
        ("a cat, a dog and a cake", "a cat", "dog cake"),
        ("a red car", "a car", ""),
        ("a cat on a beach", "a cat", ""),  # the scene
        ("a cat and a dog", "a cat and a cake", ""),
        ("a cat and a dog", "a cat and a dog and a cake", ""),
        ("a cat, a dog", "a cat and a dog", ""),
        ("a red car and a dog", "a car", ""),  # the car's colour changes too
    ],
)
def test_the_prompts_that_remove_things(source_prompt, prompt, things):
    script = diff(source_prompt, prompt, TOKENIZER)
    assert removes_objects(script) is bool(things)
    if things:
        focus = [word.text for hunk in script.hunks for word in (*hunk.focus_old, *hunk.focus_new)]
        assert focus == things.split()
