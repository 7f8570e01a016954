"""Strings to draw prompts from: words, weights and their syntax, and any letters at all."""

from __future__ import annotations

from hypothesis import strategies as st

SOME_WORDS = "a the red cat dog dog's beach , . and on in snow sleeping hat 🐱 é 42 painting of by".split()
SYNTAX = r"( ) [ ] :1.3) :0.5) :.7) :-2) : \( \) \[ \] \\ :1e9) :99999999) <|startoftext|> <|endoftext|>".split()
PHRASES = [*SOME_WORDS, *(f"({word}:{weight})" for word in ("cat", "red dog", "a") for weight in (1, 1.3, 0.5))]
PROMPTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(PHRASES), max_size=12).map(" ".join),
    st.lists(st.sampled_from([*SOME_WORDS, *SYNTAX, " ", "("]), max_size=20).map("".join),
)
