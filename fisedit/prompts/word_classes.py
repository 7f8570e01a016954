"""Word classes of English prompts, and which noun a changed word belongs to.

Rules and short word lists, no model. The module knows neither the other prompt, nor tokens, attention or pictures. An
unknown word counts as a noun.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fisedit.values import Word


def word_set(listed: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(listed.split())


DETERMINERS = word_set("a an the this that these those his her its their my your our some any no another")
ONE_THING = word_set("a an one another the this that")
"""Determiners of one thing."""
_PREPOSITIONS = word_set(  # of place and time
    "before after during throughout amid amidst beyond alongside past "
    "on in at by near next under over behind above below beside between inside outside into onto through across along "
    "around against beneath atop toward towards from upon within among"
)
_FUNCTION_WORDS = word_set(
    "and or but of with without to for as like while than then which who whose it he she they them him there is are "
    "was were be been being am has have had do does did not up down out off so very just left right front 's 't 're "
    "'ve 'm 'll 'd s"
)
_STOP = DETERMINERS | _PREPOSITIONS | _FUNCTION_WORDS
OPENING = word_set("in as like into is")
# Their object alone is new, not their subject.
CARRYING_VERBS = word_set("wearing holding carrying wears holds carries")
WEARING = CARRYING_VERBS | word_set("with on atop over")
"""Words between a thing and what it wears or carries, or what lies on it."""
_VERBS = CARRYING_VERBS | word_set(
    "sits sat stands stood runs ran walks walked jumps jumped eats ate drinks sleeps "
    "slept flies flew plays played rides rode reads looked watches watched chases chased swims swam "
    "dances danced lies lay smiles smiled laughs cries hugs kisses pulls pushes throws catches drives drove climbs "
    "climbed leaps crawls hides made dressed covered filled surrounded seated"
)
_ING_NOUNS = word_set(
    "building painting drawing wing ring king string thing spring ceiling morning evening wedding clothing earring "
    "pudding dumpling duckling sibling railing lightning lighting setting during earrings sterling herring sling "
    "swing offspring stocking icing topping frosting something everything nothing anything viking"
)
ADJECTIVES = word_set(  # only those that are no nouns as well: an orange, gold and silver are things
    "red blue green yellow purple pink black white brown gray grey big small large tiny huge little tall short long "
    "old young new happy sad angry fluffy furry shiny wet dry hot cold open closed beautiful cute ugly fat thin round "
    "empty full broken clean dirty one two three four five six seven eight nine ten many several few"
)

ENLARGING = word_set("big bigger large larger huge giant gigantic enormous tall taller long longer wide wider")
REDUCING = word_set("small smaller little tiny short shorter narrow miniature")


class WordClass(Enum):
    """The role of a word in a prompt, as far as masks depend on it."""

    PUNCTUATION = auto()
    STOP = auto()
    VERB = auto()
    CONTENT = auto()


@dataclass(frozen=True)
class TaggedPrompt:
    """The words of a prompt that the text encoder reads, each with its role."""

    words: tuple[Word, ...]
    roles: tuple[WordClass, ...]

    @classmethod
    def from_words(cls, prompt_words: Iterable[Word]) -> TaggedPrompt:
        """The sentence of a prompt's words; those without tokens are left out."""
        encoded_words = tuple(w for w in prompt_words if w.tokens)
        return cls(encoded_words, tuple(_role(encoded_words, i) for i in range(len(encoded_words))))

    def text(self, i: int) -> str:
        """The word at i, or "" before the first and after the last."""
        return self.words[i].text if 0 <= i < len(self.words) else ""

    def role(self, i: int) -> WordClass:
        """The role at i; the ends of the prompt count as punctuation."""
        return self.roles[i] if 0 <= i < len(self.roles) else WordClass.PUNCTUATION

    def has_content(self, span: Iterable[int]) -> bool:
        """Return whether a content word or verb lies in the span."""
        return any(self.roles[i] in (WordClass.CONTENT, WordClass.VERB) for i in span)

    def with_class(self, *roles: WordClass) -> list[Word]:
        """The words of these roles, in reading order."""
        return [w for w, role in zip(self.words, self.roles, strict=True) if role in roles]

    def words_at(self, indices: Iterable[int]) -> tuple[Word, ...]:
        """The words at these indices, in reading order."""
        return tuple(self.words[i] for i in sorted(indices))


def importance(text: str) -> int:
    """Return the weight of a word that finds its counterpart: one content word outweighs all stop words together."""
    return 1 if text in _STOP or not is_word(text) else 1000


def is_word(text: str) -> bool:
    """Return whether a word is more than punctuation: letters, digits, or a pictograph."""
    return any(c.isalnum() or unicodedata.category(c) == "So" for c in text)


def _role(words: Sequence[Word], i: int) -> WordClass:
    text, before, after = (words[k].text if 0 <= k < len(words) else "" for k in (i, i - 1, i + 1))
    hyphenated = (before == "-" and words[i - 1].end == words[i].start) or (
        after == "-" and words[i].end == words[i + 1].start
    )
    if not is_word(text):  # the hyphen of "t-shirt" holds a run together
        inner = text == "-" and 0 < i < len(words) - 1 and words[i - 1].end == words[i].start
        return WordClass.CONTENT if inner and words[i].end == words[i + 1].start else WordClass.PUNCTUATION
    if text in _STOP and not hyphenated:
        return WordClass.STOP
    verb = text in _VERBS or (text.endswith("ing") and len(text) > 4 and text not in _ING_NOUNS)
    # "a sleeping cat": between a determiner and a noun a participle is a modifier
    modifier = before in DETERMINERS | ADJECTIVES and is_word(after) and after not in _STOP
    return WordClass.VERB if verb and not modifier else WordClass.CONTENT


def run_around(s: TaggedPrompt, i: int) -> range:
    """The unbroken content words around i: a noun with its modifiers."""
    start = stop = i
    while s.role(start - 1) is WordClass.CONTENT:
        start -= 1
    while s.role(stop + 1) is WordClass.CONTENT:
        stop += 1
    return range(start, stop + 1)


def noun_phrase(s: TaggedPrompt, i: int) -> range:
    """The noun that content word i belongs to, with modifiers and determiners, "and" between adjectives included."""
    run = run_around(s, i)
    start = run.start
    while s.text(start - 1) in DETERMINERS | ADJECTIVES | {"and"}:
        start -= 1
    return range(start, run.stop)


def _nearest(s: TaggedPrompt, i: int, step: int) -> list[int]:
    """The head of the closest run to the left (step -1) or right (+1) of word i, as a list of one or none."""
    i += step
    while 0 <= i < len(s.words):
        if s.roles[i] is WordClass.CONTENT:
            return head_of(s, i, search_outside=False)
        i += step
    return []


def head_of(s: TaggedPrompt, i: int, search_outside: bool = True) -> list[int]:
    """The noun that content word i belongs to: the last of its run, or, for "is red", the noun before.

    Args:
        s: the prompt.
        i: index of a content word.
        search_outside: look at the runs beside where its own holds no noun.

    Returns:
        Its index, as a list of one.
    """
    run = run_around(s, i)
    nouns = [k for k in run if s.text(k) not in ADJECTIVES and is_word(s.text(k))]
    if nouns or not search_outside:
        return nouns[-1:] or [run[-1]]
    return _nearest(s, run[0], -1) or _nearest(s, run[-1], +1) or [run[-1]]


def object_of(s: TaggedPrompt, i: int) -> list[int]:
    """The noun that directly follows word i, determiners aside, as a list of one or none."""
    k = i + 1
    while s.text(k) in DETERMINERS:
        k += 1
    return head_of(s, k) if s.role(k) is WordClass.CONTENT else []


def _nouns_of_verb(s: TaggedPrompt, i: int, object_only: bool) -> list[int]:
    """Subject and direct object of the verb at i."""
    objects = object_of(s, i)
    return objects if object_only and objects else _nearest(s, i, -1) + objects


def _nouns_of_stop_word(s: TaggedPrompt, i: int) -> list[int]:
    """The nouns of a stop word: both of a preposition of place, the one after any other, or the one before."""
    if s.text(i) in _PREPOSITIONS:
        return _nearest(s, i, -1) + _nearest(s, i, +1)
    return object_of(s, i) or _nearest(s, i, -1) or _nearest(s, i, +1)


def focus(s: TaggedPrompt, span: range, other_has_content: bool) -> set[int]:
    """The nouns that show where one side of a change is.

    A noun shows itself and its modifiers, a verb is shown by subject and object, a preposition by both its nouns.

    Args:
        s: the prompt of that side.
        span: indices of the changed words; may be empty.
        other_has_content: whether the change's other side holds a content word or verb.

    Returns:
        Indices into `s.words`; empty where nothing can be pointed at.
    """
    if not s.has_content(span):
        return (
            set()
            if other_has_content
            else {k for i in span if s.roles[i] is WordClass.STOP for k in _nouns_of_stop_word(s, i)}
        )
    content = [i for i in span if s.roles[i] is WordClass.CONTENT]
    heads = sorted({k for i in content for k in head_of(s, i)})
    if not other_has_content:  # "a hat on his head" is added at the hat
        heads = [k for n, k in enumerate(heads) if not (n and _is_placement(s, k, span))]
    verbs = [i for i in span if s.roles[i] is WordClass.VERB]
    return {*heads, *(k for i in verbs for k in _nouns_of_verb(s, i, bool(heads) and s.text(i) in CARRYING_VERBS))}


def _is_placement(s: TaggedPrompt, head: int, span: range) -> bool:
    """Return whether a noun of the span names the place of another alone: it follows a preposition of the span."""
    i = run_around(s, head)[0] - 1
    while s.text(i) in DETERMINERS:
        i -= 1
    return i in span and s.text(i) in _PREPOSITIONS
