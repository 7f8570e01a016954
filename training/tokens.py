"""A CLIP tokenizer for the scenes' language: each of its words is one token, and any other text still has tokens.

Knows nothing of models.
"""

import re
from functools import lru_cache
from itertools import pairwise

from transformers import CLIPTokenizer

from benchmarks.scenes.prompts import ScenePrompt, prompt_words

LENGTH = 77
START, END = "<|startoftext|>", "<|endoftext|>"
Merge = tuple[str, str]


def byte_alphabet() -> tuple[str, ...]:
    """One printable character for each byte, in byte order, as GPT-2 and CLIP write them."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    spare = iter(range(256, 512))
    return tuple(chr(byte) if byte in plain else chr(next(spare)) for byte in range(256))


def learn_merges(words: tuple[str, ...]) -> list[Merge]:
    """Merges that make each word one token.

    A word's missing merges come after all earlier ones, so they can never break up an earlier word.
    """
    merges: list[Merge] = []
    for word in words:
        pieces = _apply(merges, [*word[:-1], word[-1] + "</w>"])
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces = _apply(merges, pieces)
    return merges


def _apply(merges: list[Merge], pieces: list[str]) -> list[str]:
    """Byte-pair encoding: joins the earliest-learnt pair until none is left."""
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    while True:
        known = [(ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not known:
            return pieces
        _, i = min(known)
        pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]


@lru_cache(maxsize=2)
def build_tokenizer(words: tuple[str, ...] | None = None) -> CLIPTokenizer:
    """The demo model's tokenizer; the empty prompt is start, end and padding by end, as in Stable Diffusion.

    Of `words` alone each is one token if they are given; the others are spelled. Tokens have the same numbers.
    """
    merges = learn_merges(prompt_words())
    letters = byte_alphabet()
    entries = [*letters, *(letter + "</w>" for letter in letters), *("".join(merge) for merge in merges), START, END]
    numbered = {entry: index for index, entry in enumerate(dict.fromkeys(entries))}
    unknown = set(prompt_words()) - set(prompt_words() if words is None else words)
    spelled = {f"{word}</w>" for word in unknown if len(word) > 1}
    return CLIPTokenizer(
        vocab={entry: number for entry, number in numbered.items() if entry not in spelled},
        merges=[merge for merge in merges if "".join(merge) not in spelled],
        model_max_length=LENGTH,
    )


def is_one_token(word: str, tokenizer: CLIPTokenizer) -> bool:
    """Whether a tokenizer knows a word, and need not spell it."""
    return len(tokenizer(word, add_special_tokens=False).input_ids) == 1


def encode(prompts: list[str]) -> list[list[int]]:
    """Token ids, each row padded or cut to LENGTH."""
    found = build_tokenizer()(prompts, padding="max_length", truncation=True, max_length=LENGTH)
    rows: list[list[int]] = found["input_ids"]
    return rows


def token_positions(sentence: ScenePrompt) -> tuple[int, ...]:
    """Where each part's noun stands in the token row (the start token is position 0)."""
    before = (sentence.text[: span.start] for span in sentence.spans)
    return tuple(1 + len(re.findall(r"\w+|[^\w\s]", text)) for text in before)
