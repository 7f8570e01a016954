"""Prompts that edits of a noun lead to: without it, or in another colour. Knows prompts; no session."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fisedit.prompts.shortening import without_things
from fisedit.prompts.text_diff import words
from fisedit.prompts.whole_picture import object_words
from fisedit.prompts.word_classes import TaggedPrompt, run_around, word_set

if TYPE_CHECKING:
    from fisedit.prompts.text_diff import Tokenizer

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
"""Colours that the page offers."""

_KNOWN = {*COLOURS} | word_set("gray grey golden silver cyan magenta teal turquoise violet beige")
_COUNTS = word_set("one two three four five six seven eight nine ten many several few")
_ARTICLE = re.compile(r"\b(a)n?(?=\s+$)", re.IGNORECASE)


@dataclass(frozen=True)
class NounEdits:
    """A noun of a prompt, and the prompts that edits of it lead to.

    Args:
        start: its first character in the prompt.
        end: the character behind its last one.
        removed: the prompt without it; "" where that is none.
        recoloured: colour -> the prompt with the noun in it.
    """

    start: int
    end: int
    removed: str
    recoloured: Mapping[str, str]


def noun_edits(prompt: str, tokenizer: Tokenizer) -> tuple[NounEdits, ...]:
    """Return the nouns that name a thing in the picture, in reading order.

    Args:
        prompt: what the picture shows.
        tokenizer: a CLIPTokenizer.
    """
    s = TaggedPrompt.from_words(words(prompt, tokenizer))
    found = []
    for noun in object_words(s):
        shorter = without_things(prompt, [noun], tokenizer)
        run = [i for i in run_around(s, s.words.index(noun)) if s.text(i) not in _COUNTS or s.words[i] == noun]
        old = next((s.words[i] for i in run if s.words[i].text in _KNOWN and s.words[i] != noun), None)
        start, end = (old.start, old.end) if old else (s.words[run[0]].start,) * 2
        colours = {each: _recoloured(prompt, start, end, each) for each in COLOURS if not old or old.text != each}
        found.append(NounEdits(noun.start, noun.end, "" if shorter == prompt else shorter, colours))
    return tuple(found)


def _recoloured(prompt: str, start: int, end: int, colour: str) -> str:
    """Return a prompt with a colour in place of its characters [start, end), and the article that fits."""
    article = "n" if colour[0] in "aeiou" else ""
    before = _ARTICLE.sub(rf"\g<1>{article}", prompt[:start])
    return f"{before}{colour}{'' if end > start else ' '}{prompt[end:]}"
