"""A prompt without some of its things: their noun phrases go, and the words that join them to the rest.

Pure text. What would not read as the words that are left, as with brackets around one of them alone, stays whole.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from fisedit.prompts.text_diff import JOINING, words
from fisedit.prompts.whole_picture import LOCATING, object_words
from fisedit.prompts.word_classes import (
    CARRYING_VERBS,
    DETERMINERS,
    TaggedPrompt,
    WordClass,
    head_of,
    is_word,
    noun_phrase,
    object_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from fisedit.prompts.text_diff import Tokenizer
    from fisedit.values import Word


def without_things(prompt: str, things: Collection[Word], tokenizer: Tokenizer) -> str:
    """Return a prompt without some things: of "a cat and a dog on a beach" without the cat "a dog on a beach".

    Args:
        prompt: any text.
        things: its nouns that name them, as `whole_picture.object_words` finds them.
        tokenizer: a CLIPTokenizer.

    Returns:
        The shorter prompt, "" where no noun is left; `prompt` itself where it cannot be shortened.
    """
    if not things:
        return prompt
    every = words(prompt, tokenizer)
    s = TaggedPrompt.from_words(every)
    rest, commas = list(range(len(s.words))), set["Word"]()
    for i in (s.words.index(thing) for thing in things):
        if i in rest:
            phrase = _with_worn(s, _phrase(s, i))
            left, right = [k for k in rest if k < phrase.start], [k for k in rest if k >= phrase.stop]
            rest, ended = _joined(s, left, right)
            commas |= {*s.words_at(ended)}
    if not any(s.roles[i] is WordClass.CONTENT for i in rest):
        return ""
    gone = {*s.words} - {*s.words_at(rest)}
    kept = [word for word in every if word not in gone]
    shorter = _text(prompt, every, kept, commas)
    expected = [("and" if word in commas else word.text, word.weight) for word in kept]
    return shorter if [(word.text, word.weight) for word in words(shorter, tokenizer)] == expected else prompt


def _joined(s: TaggedPrompt, left: list[int], right: list[int]) -> tuple[list[int], list[int]]:
    """Join what stands before a phrase to what stands behind it.

    Args:
        s: the prompt.
        left: indices of the words before.
        right: indices of the words behind.

    Returns:
        Indices of the words that are left, and of a comma for which "and" is to stand.
    """
    before, after = _joint(s, left[::-1])[::-1], _joint(s, right)
    last, following = left[: len(left) - len(before)], right[len(after) :]
    is_listed = _joins(s, before) and _is_thing(s, last[-1:])
    if _joins(s, after) and _is_thing(s, following[:1]) and not is_listed:
        return left + following, []
    has_complement = [s.text(k) for k in before[-1:]] == ["of"] and following and not _joins(s, after)
    if not last or not before or has_complement:  # as "a photo of a cat on a beach" is one "of a beach" then
        return left + following, []
    ends_list = s.text(before[-1]) in ("and", "or") and is_listed and not _joins(s, after)
    return left[: len(left) - _length(s, before)] + right, _comma_before(s, last) if ends_list else []


def _comma_before(s: TaggedPrompt, left: list[int]) -> list[int]:
    """Return the index of the comma between the last two things of a list, as a list of one or none."""
    while left:
        left = [k for k in left if k < _phrase(s, left[-1]).start]
        joint = _joint(s, left[::-1])[::-1]
        left = left[: len(left) - len(joint)]
        if [s.text(k) for k in joint] == [","]:
            return joint if _is_thing(s, left[-1:]) and not _is_placed(s, left[-1]) else []
        if not joint:
            break
    return []


def _is_placed(s: TaggedPrompt, i: int) -> bool:
    """Return whether a prompt begins with the place of its things, whose last word this is: "on a planet, a cat"."""
    start = _phrase(s, i).start
    return start > 0 and s.text(0) in LOCATING and not s.has_content(range(start))


def _with_worn(s: TaggedPrompt, phrase: range) -> range:
    """A phrase with what its thing wears or carries: "a cat wearing a hat"."""
    worn = object_of(s, phrase.stop) if s.text(phrase.stop) in CARRYING_VERBS else []
    return range(phrase.start, _phrase(s, worn[0]).stop) if worn else phrase


def _phrase(s: TaggedPrompt, i: int) -> range:
    """Return the noun phrase of content word i, without what joins it to another."""
    phrase = noun_phrase(s, i)
    return phrase[1:] if s.text(phrase.start) in JOINING else phrase


def _joint(s: TaggedPrompt, indices: Iterable[int]) -> list[int]:
    """Return the first of some words that belong to no noun phrase."""
    return [*takewhile(lambda k: s.roles[k] is not WordClass.CONTENT and s.text(k) not in DETERMINERS, indices)]


def _length(s: TaggedPrompt, joint: Sequence[int]) -> int:
    """Return how many of the words before a phrase go with it: "next to" of "sitting next to", else all."""
    small = [*takewhile(lambda k: s.roles[k] is not WordClass.VERB, joint[::-1])]
    return len(small or joint)


def _joins(s: TaggedPrompt, joint: Sequence[int]) -> bool:
    """Return whether there is a joint, of words that join a list."""
    return bool(joint) and all(s.text(k) in JOINING for k in joint)


def _is_thing(s: TaggedPrompt, neighbour: Sequence[int]) -> bool:
    """Return whether there is a neighbour, a word of the phrase of a thing in a place of its own."""
    if not neighbour:
        return False
    k = neighbour[0]
    while s.text(k) in DETERMINERS:
        k += 1
    return not {*object_words(s)}.isdisjoint(s.words_at(head_of(s, k)))


def _text(prompt: str, every: Sequence[Word], kept: Collection[Word], commas: Collection[Word]) -> str:
    """Return the words that are kept, as they stand in the prompt; arguments as in `without_things`."""
    starts = [len(prompt[: word.start].rstrip("([")) for word in every[1:]]
    text, is_whole = "", True
    for word, start, end in zip(every, [0, *starts], [*starts, len(prompt)], strict=True):
        if word in kept:
            text = text if is_whole else text.rstrip() + " " * (is_word(word.text) and bool(text))
            text = f"{text} and{prompt[word.end : end]}" if word in commas else text + prompt[start:end]
        is_whole = word in kept
    return text.rstrip()
