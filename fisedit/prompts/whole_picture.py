"""The changed words that concern the whole picture and no place in it: style, medium, weather, time, scene.

Rules on the sentence, short lists of words that pictures' prompts use, and WordNet's classes for all other words
(`noun_classes`). It knows neither the other prompt, nor tokens, attention or pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fisedit.prompts.noun_classes import classes_of
from fisedit.prompts.word_classes import (
    ADJECTIVES,
    DETERMINERS,
    OPENING,
    TaggedPrompt,
    WordClass,
    head_of,
    is_word,
    noun_phrase,
    run_around,
    word_set,
)

if TYPE_CHECKING:
    from fisedit.values import Word

_STYLES = word_set(
    "anime watercolor watercolour cartoon impressionist impressionism cubist cubism photorealistic realistic surreal "
    "hyperrealistic monochrome grayscale sepia cinematic pixelated ukiyo lowpoly style styled"
)
_STANDALONE_STYLES = word_set(  # styles when they stand alone, not before a noun ("a vintage car")
    "vintage retro noir steampunk cyberpunk vaporwave gothic baroque minimalist abstract realism surrealism "
    "masterpiece quality detailed artstation hd uhd hdr k mm bokeh resolution lighting mood atmosphere palette tones "
    "colors colours colorful background backdrop aesthetic pastel isometric"
)
_MEDIA = word_set(
    "photo photograph photography picture image painting sketch drawing illustration render rendering portrait print "
    "watercolor pencil oil charcoal engraving etching mosaic sculpture collage poster comic art artwork doodle shot "
    "closeup up view canvas fresco woodcut mural animation cgi graffiti"
)
_WEATHER = word_set(
    "snowy rainy foggy misty stormy sunny cloudy overcast hazy snowing raining sunlit moonlit wintry nighttime "
    "daytime underwater"
)
_LIGHT_WORDS = word_set("light lights sky skies")  # "morning light", but "traffic light"
_TIMES = word_set(
    "night sunset day dawn dusk sunrise noon midnight morning evening afternoon twilight hour winter summer autumn "
    "fall spring season"
)
_SCENES = _TIMES | word_set(
    "beach snow grass desert sea ocean forest jungle woods meadow field fields mountains hills city town village "
    "street park garden kitchen bedroom bathroom room studio space landscape scenery cityscape seascape skyline rain "
    "fog mist storm thunderstorm snowstorm blizzard sunshine lightning weather shore coast island valley savanna "
    "swamp cave farm countryside suburb lawn sand library museum office classroom restaurant cafe market stadium "
    "candlelight moonlight sunlight daylight wasteland wilderness outdoors indoors rainforest canyon tundra dunes"
)
LOCATING = word_set("in at inside on within across through among amongst")
"""Prepositions after which a place is where all of the picture is; what is near, behind or under a place is in it."""
_SURROUNDING = LOCATING | word_set("under beneath during after before by amid amidst throughout until around")
_LEADING = _SURROUNDING | word_set("by")
_STYLE_NOUNS = word_set("style manner vein spirit tradition")
_STYLE_ENDINGS = ("esque", "punk", "wave", "core", "ism")
_ATTRIBUTES = word_set("hair eyes eye skin beard face body hands arms legs fur feathers wings ears tail clothes")


def object_words(s: TaggedPrompt) -> tuple[Word, ...]:
    """The nouns that name a thing in a place of its own; styles, media, scenes and times are none."""
    content = (i for i in range(len(s.words)) if s.roles[i] is WordClass.CONTENT and not _reason(_Phrase(s, i)))
    return s.words_at({k for i in content for k in head_of(s, i)})


def background_text(s: TaggedPrompt) -> str:
    """Return the phrases that concern the whole picture, as a prompt: its medium, style, scene, weather and time.

    What they belong to is left out: of "a photo of a red cat on a beach" it is "a photo on a beach".

    Args:
        s: the prompt.
    """
    kept: set[int] = set()
    for i, role in enumerate(s.roles):
        if s.text(i) in _WEATHER and role is not WordClass.CONTENT:
            kept.add(i)
        elif role is WordClass.CONTENT and i == run_around(s, i)[-1] and _reason(phrase := _Phrase(s, i)):
            is_complement = phrase.before == "of" and phrase.first - 2 in kept  # "a photo of a beach"
            leads = phrase.first - (phrase.before in _LEADING or is_complement)
            kept |= {*range(leads, i + 1)}
    return " ".join(word.text for word in s.words_at(kept))


def global_reason(s: TaggedPrompt, span: range, other_has_content: bool) -> str:
    """Return why the changed words concern the whole picture and no place in it (style, weather, scene), or "".

    Args:
        s: the prompt of one side of a change.
        span: indices of the changed words; may be empty.
        other_has_content: whether the change's other side holds a content word or verb.
    """
    candidates = (i for i in span if s.roles[i] is WordClass.CONTENT or s.text(i) in _WEATHER)  # "raining" is a verb
    phrases = (_Phrase(s, i, range(0) if other_has_content else span) for i in candidates)
    return next(filter(None, map(_reason, phrases)), "")


@dataclass(frozen=True)
class _Phrase:
    """A word in its noun phrase, and what stands before it.

    Args:
        s: the prompt.
        i: index of a content word.
        added: indices of the words that stand in one of the prompts alone, with nothing in their place.
    """

    s: TaggedPrompt
    i: int
    added: range = range(0)

    @property
    def text(self) -> str:
        """The word."""
        return self.s.text(self.i)

    @cached_property
    def run(self) -> range:
        """Indices of the noun and its modifiers."""
        return run_around(self.s, self.i)

    @property
    def noun(self) -> str:
        """The phrase's last word."""
        return self.s.text(self.run[-1])

    @cached_property
    def classes(self) -> frozenset[str]:
        """WordNet's classes of the noun."""
        return classes_of([self.s.text(k) for k in self.run])

    @cached_property
    def first(self) -> int:
        """Index of the phrase's first word, determiners and "and" between adjectives included."""
        return noun_phrase(self.s, self.i).start

    @property
    def bare(self) -> bool:
        """Return whether no determiner is in front."""
        return self.s.text(self.run[0] - 1) not in DETERMINERS

    @property
    def before(self) -> str:
        """The text before the phrase: a preposition, a verb, punctuation, or ""."""
        return self.s.text(self.first - 1)

    @property
    def after(self) -> str:
        """The text that follows the phrase."""
        return self.s.text(self.run[-1] + 1)

    @property
    def starts_clause(self) -> bool:
        """Return whether the phrase begins the prompt or a part of it."""
        return self.s.role(self.first - 1) is WordClass.PUNCTUATION

    @property
    def is_added_place(self) -> bool:
        """Return whether the phrase names the place of something that is added with it."""
        k = self.first - 2
        return k in self.added and self.s.role(k) in (WordClass.CONTENT, WordClass.VERB)


def _reason(p: _Phrase) -> str:
    """Return why a word concerns the whole picture, or ""."""
    return next((f'"{p.text}" {message}' for message, applies in _RULES if applies(p)), "")


def _is_style(p: _Phrase) -> bool:
    return p.text in _STYLES or p.noun in _STYLES | _STANDALONE_STYLES


def _names_style(p: _Phrase) -> bool:
    start = p.run[0] - 1
    return p.s.text(start) == "by" or (p.s.text(start) == "of" and p.s.text(start - 1) in _STYLE_NOUNS)


def _is_scene(p: _Phrase) -> bool:
    return p.text in _WEATHER or p.noun in _SCENES or (p.noun in _LIGHT_WORDS and p.text in _TIMES)


def _is_medium(p: _Phrase) -> bool:
    ends = p.after in ("of", "showing", "") or not is_word(p.after)
    if (p.starts_clause or p.before in OPENING) and ends and (p.noun in _MEDIA or "medium" in p.classes):
        return True
    # "a NOUN of a cat": what is no part of the cat presents it
    presents_subject = p.starts_clause and p.after == "of" and p.s.text(p.run[-1] + 2) in DETERMINERS
    return presents_subject and not p.classes & {"thing", "place", "part"} and p.noun not in _ATTRIBUTES


def _is_global_modifier(p: _Phrase) -> bool:
    """Return whether a modifier of style, weather or time belongs to no thing.

    "A gothic sword" stays where the sword is.
    """
    word_classes = classes_of([p.text])  # "frosty" says what the weather is, "snow" of a snow globe does not
    is_general = (
        "style" in word_classes
        or p.text.endswith(_STYLE_ENDINGS)
        or ("adjective" in word_classes and word_classes & {"weather", "time"})
    )
    return bool(is_general) and p.i != p.run[-1] and ("thing" not in p.classes or "place" in p.classes)


def _surrounds(p: _Phrase) -> bool:
    """Weather and times, as in "during a gale", "at dusk"."""
    return bool(p.classes & {"weather", "time"}) and p.before in _SURROUNDING


def _is_place(p: _Phrase) -> bool:
    """Places that all of the picture is in; a part of it may be in any place ("a dog on a lawn" is added)."""
    return "place" in p.classes and p.before in LOCATING and not p.is_added_place


def _is_date(p: _Phrase) -> bool:
    """Years and decades, whose digits are words of their own."""
    digits = [p.s.text(k).isdigit() for k in p.run]
    return sum(digits) >= 3 and p.text.isdigit() and (digits[-1] or p.noun == "s")


def _is_tag(p: _Phrase) -> bool:
    """A part of the prompt after a comma that names no thing: tags are mostly styles and quality."""
    first, noun = p.run[0], p.noun
    is_whole_clause = (
        p.s.role(first - 1) is WordClass.PUNCTUATION and first > 0 and (p.after == "" or not is_word(p.after))
    )
    has_plain_words = p.s.text(first) not in ADJECTIVES and noun not in _ATTRIBUTES
    return is_whole_clause and has_plain_words and "thing" not in p.classes


def _describes_place(p: _Phrase) -> bool:
    """An adjective of a place that is the picture's subject."""
    names_place = "place" in p.classes and "thing" not in p.classes
    is_unclassified = p.text not in ADJECTIVES and not classes_of([p.text])
    return names_place and is_unclassified and p.starts_clause and p.i != p.run[-1]


_RULES = (
    ("changes the style", _is_style),
    ("names a style", _names_style),
    ("changes the scene", _is_scene),
    ("changes the medium", _is_medium),
    ("changes the style", _is_global_modifier),
    ("changes the scene", _surrounds),
    ("changes the scene", _is_place),
    ("changes the scene", _is_date),
    ("changes the style", _is_tag),
    ("changes the scene", _describes_place),
)
"""The messages on a word -> when they hold; the first counts."""
