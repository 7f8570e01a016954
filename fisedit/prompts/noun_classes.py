"""Classes of English words after WordNet: places, weather, times, styles, media, and things.

Reads a list that `tests/support/wordnet_classes.py` writes from WordNet 3.0. Knows words, no sentences.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SINGULAR = (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("sses", "ss"), ("xes", "x"), ("s", ""))
"""Ending of a plural -> of its singular."""


@lru_cache(maxsize=1)
def _load_classes() -> Mapping[str, frozenset[str]]:
    """Word or name -> its classes."""
    text = files("fisedit.masking").joinpath("noun_classes.txt").read_text("utf-8")
    classes: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        if not line.startswith(";"):
            name, _, members = line.partition(":")
            classes |= {word: classes.get(word, frozenset()) | {name} for word in members.split()}
    return classes


def _singular(word: str) -> str:
    ending, replaced = next(((end, new) for end, new in _SINGULAR if word.endswith(end)), ("", ""))
    return word.removesuffix(ending) + replaced


def classes_of(words: Sequence[str]) -> frozenset[str]:
    """The classes of a name: of its last two words where they are listed as one, else of the last.

    Args:
        words: The words of a noun with its modifiers, in lower case, at least one.

    Returns:
        Of "place", "weather", "time", "style", "medium", "part", "thing" and "adjective"; none for an unknown word.
    """
    last, classes = words[-1], _load_classes()
    names = ["_".join([*words[-2:-1], form]) for form in (last, _singular(last)) if len(words) > 1]
    return next((classes[name] for name in (*names, last, _singular(last)) if name in classes), frozenset())
