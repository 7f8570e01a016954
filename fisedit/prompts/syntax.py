r"""Finds what web UIs read in a prompt and no text encoder does: tags of LoRAs, changes with the steps, choices.

A tag of a LoRA is no word, and is applied or told. Syntax that changes the picture by steps or at random is refused by
name. Marks of other programs' weights and comments are read as words, and told.
Weights, `(cat:1.2)` and `[cat]`, are read by `prompts.weighting`, and BREAK by `prompts.chunks`. Pure text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from fisedit.errors import PromptError

_TAG = re.compile(r"<([A-Za-z]\w*):([^<>]*)>")
_LORA_TAGS = ("lora", "lyco")
_BRACKET = re.compile(r"\\.|[\[\]()|]", re.DOTALL)
_CLOSING = {"[": "]", "(": ")"}
_REACH = 60  # letters of a step's number and the spaces around it
_WHEN = re.compile(r":\s*[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?\s*\Z")
_PATTERNS = (
    (re.compile(r"\bAND\b"), "joins pictures of several prompts, which is not done; write 'and' for the word"),
    (re.compile(r"__[^\W_][\w.*/-]{0,200}?__"), "stands for a line of a wildcard file; write the words instead"),
    (re.compile(r"(?<!\\)\{[^{}|]*\|[^{}]*\}"), "chooses at random; write the choice instead"),
)
"""The patterns of syntax that is refused, each with the reason."""

_EMBEDDING = re.compile(
    r"(?<![\w\\<])(?P<prefix>embedding:)(?P<name><[\w-]+>|[\w-]+)(?P<suffix>\.(?:safetensors|pt|bin)\b)?", re.IGNORECASE
)
_WEIGHT = "which is read as words; (word:1.2) weights a word"
_WORDS = (
    (re.compile(r"(?<![\\{])\{++[^{}]*+\}++"), rf"{_WEIGHT}, and \{{ is a brace"),
    (re.compile(r"(?<![\w:.])-?[\d.]{1,9}::[^:\n]*+(?:::)?|\w{1,20}::-?[\d.]{1,9}"), _WEIGHT),
    (
        re.compile(r"(?:[^\W\d]{1,20}|(?<!\\)[)\"])(?:\++|--+)(?=[\s,.)\]]|\Z)"),
        f"{_WEIGHT}; a space before it keeps this away",
    ),
    (re.compile(r"(?<!\\)\)[\d.]{0,9}\d|\.(?:swap|blend|and)\("), _WEIGHT),
    (
        re.compile(r"(?:^|(?<=\s))(?:#(?=\s)|//|/\*)[^\n]*", re.MULTILINE),
        r"which is read as words, for there are no comments; leave it out",
    ),
)
"""The patterns that are read as words and mean something elsewhere, each with what the user is told. They come from
NovelAI, compel, Midjourney and ComfyUI."""

_ALTERNATES = r"changes with every step, which is not done; write one of both, or \[ for a bracket"
_SCHEDULED = r"changes at a step, which is not done; write one of both, or \[ for a bracket"


def take_loras(prompt: str) -> tuple[str, dict[str, float]]:
    """Take the tags of LoRAs out of a prompt: `<lora:name:0.8>`, `<lora:name>` for 1, and `<lyco:...>` alike.

    Args:
        prompt: any text.

    Returns:
        The text without them, and their names with their scales.

    Raises:
        PromptError: a tag without a name, with a scale that is no number, with further values, or of a name again.
    """
    scales: dict[str, float] = {}
    for tag in filter(_is_lora, _TAG.finditer(prompt)):
        name, *values = (part.strip() for part in tag[2].split(":"))
        if not name or len(values) > 1:
            raise PromptError(f"a LoRA's tag must have a name and a scale, got {tag[0]:.80}; write <lora:name:0.8>")
        if name in scales:
            raise PromptError(f"prompt must name a LoRA once, got {tag[0]:.80} again; leave one of both out")
        scales[name] = _scale(tag[0], values)
    return (without_loras(prompt) if scales else prompt), scales


def without_loras(prompt: str) -> str:
    """Return a prompt without the tags of LoRAs, whatever stands in them."""
    return _TAG.sub(lambda tag: "" if _is_lora(tag) else tag[0], prompt).strip()


def blank_tags(prompt: str) -> str:
    """Return a prompt with spaces in place of what is no word, so that every other letter keeps its place.

    Args:
        prompt: with tags of LoRAs, or `embedding:` before a word and a file's suffix behind it.
    """
    blank = _TAG.sub(lambda tag: " " * len(tag[0]) if _is_lora(tag) else tag[0], prompt)
    return _EMBEDDING.sub(lambda found: f"{'':10}{found['name']}{' ' * len(found['suffix'] or '')}", blank)


def named_embeddings(prompt: str) -> tuple[str, ...]:
    """Return the words of a prompt that ComfyUI's `embedding:word` names."""
    return tuple(found["name"] for found in _EMBEDDING.finditer(prompt))


def syntax_notes(prompt: str, name: str = "prompt") -> tuple[str, ...]:
    """Return notes on what a prompt has and nothing here does: tags of LoRAs, other programs' weights and comments.

    Args:
        prompt: any text.
        name: for the notes.
    """
    why = "which is not applied: LoRAs count as they are loaded, by load_lora, --lora or the app's list"
    tags = [tag[0] for tag in _TAG.finditer(prompt) if _is_lora(tag)]
    plain = blank_tags(prompt)
    words = [(found[0].strip(), told) for pattern, told in _WORDS if (found := pattern.search(plain))]
    return tuple(f"the {name} has {shorten(part)}, {told}" for part, told in [*((tag, why) for tag in tags), *words])


def shorten(part: str) -> str:
    """Return a part of a prompt for a message: on one line, of 80 letters at most."""
    part = " ".join(part.split())
    return part if len(part) <= 80 else f"{part[:79]}…"


def check_syntax(prompt: str, name: str = "prompt") -> None:
    """Raise PromptError for the first part of a prompt that web UIs read and nothing here does.

    Args:
        prompt: any text.
        name: for the message.
    """
    for found, reason in _unread(prompt):
        raise PromptError(f"{name} has {shorten(found)}, which {reason}")


def _unread(prompt: str) -> Iterator[tuple[str, str]]:
    """Yield every part of a prompt that is not read, and the reason."""
    prompt = blank_tags(prompt)
    for tag in _TAG.finditer(prompt):
        is_word = tag[1].casefold().startswith("embed")
        yield tag[0], f"is a tag that is not supported; {'write the loaded word alone' if is_word else 'leave it out'}"
    in_capitals = prompt.isupper()  # then AND is a word like the others
    for pattern, reason in _PATTERNS:
        for found in pattern.finditer(prompt):
            if not (in_capitals and found[0] == "AND"):
                yield found[0], reason
    yield from _steps_syntax(prompt)


def _steps_syntax(prompt: str) -> Iterator[tuple[str, str]]:
    """Brackets of words that change with the steps: `[a|b]`, `[a:b:0.5]`, `[a:0.5]`, `[a::0.5]`."""
    opened: list[tuple[str, int]] = []  # what closes every open bracket, and its place
    waiting, barred = Counter[str](), set[int]()  # open brackets by what closes them; places of those with a bar inside
    for mark in _BRACKET.finditer(prompt):
        sign, place = mark[0], mark.start()
        if sign in _CLOSING:
            opened.append((_CLOSING[sign], place))
            waiting[_CLOSING[sign]] += 1
        elif sign == "|" and opened:
            barred.add(opened[-1][1])
        elif waiting[sign]:
            closing, start = "", 0
            while closing != sign:  # others that are open inside are no pairs
                closing, start = opened.pop()
                waiting[closing] -= 1
            if sign == "]" and (start in barred or _WHEN.search(prompt, max(start, place - _REACH), place)):
                yield prompt[start : place + 1], _ALTERNATES if start in barred else _SCHEDULED


def _is_lora(tag: re.Match[str]) -> bool:
    return tag[1].casefold() in _LORA_TAGS


def _scale(tag: str, values: list[str]) -> float:
    try:
        return float(values[0]) if values else 1.0
    except ValueError:
        raise PromptError(f"a LoRA's tag must have a number for its scale, got {tag:.80}; write 0.8") from None
