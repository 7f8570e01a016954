"""The words that a small model knows, as `vocabulary.json` in its folder lists them. Most models have no such file.

Knows files and text; no tokenizer and no pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisedit.errors import ModelError
from fisedit.models.weight_files import read_json
from fisedit.prompts.chunks import BREAK

VOCABULARY_FILE = "vocabulary.json"

_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_MAX_NAMED, _MAX_CHARACTERS = 5, 40  # unknown words in a note, and letters of each


@dataclass(frozen=True)
class Vocabulary:
    """The words that a model was trained to draw.

    Args:
        words: all that it knows, in lower case.
        summary: what it draws, as the beginning of a sentence.
        documentation: where more is said, such as a file's name.
        examples: prompts that it draws well.
    """

    words: frozenset[str]
    summary: str
    documentation: str
    examples: tuple[str, ...] = ()

    def unknown_words(self, prompt: str) -> tuple[str, ...]:
        """The words of a prompt that the model does not know, each once, in lower case.

        Args:
            prompt: without the syntax of weights.
        """
        words = dict.fromkeys(word.lower() for word in _WORD.findall(prompt) if word != BREAK)
        return tuple(word for word in words if word not in self.words)

    def note(self, prompt: str, others: Collection[str] = ()) -> str:
        """A sentence that names the unknown words of a prompt; "" where there are none.

        Args:
            prompt: without the syntax of weights.
            others: words that were added to the model, in lower case.
        """
        unknown = tuple(word for word in self.unknown_words(prompt) if word not in others)
        if not unknown:
            return ""
        more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        named = ", ".join(f"'{word:.{_MAX_CHARACTERS}}'" for word in unknown[:_MAX_NAMED])
        return f"{self.summary}; it does not know {named}{more}: see {self.documentation}"


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of a model's folder; None where the folder lists no words, or has a file of another kind.

    Args:
        folder: The folder of the model.

    Raises:
        ModelError: the file is damaged.
    """
    path = folder / VOCABULARY_FILE
    if not path.is_file():
        return None
    table = read_json(path)
    if "words" not in table:
        return None
    words, examples = _strings(path, table, "words"), _strings(path, table, "examples", ())
    summary = _string(path, table, "summary", "the model knows few words")
    documentation = _string(path, table, "documentation", f"{VOCABULARY_FILE} in its folder")
    return Vocabulary(frozenset(word.lower() for word in words), summary, documentation, examples)


def vocabulary_of(pipe: Any) -> Vocabulary | None:
    """The vocabulary of a pipeline that `fisedit.models.loader.load` loaded; None where it lists no words.

    Args:
        pipe: any pipeline.
    """
    vocabulary = getattr(pipe, "vocabulary", None)
    return vocabulary if isinstance(vocabulary, Vocabulary) else None


def _strings(path: Path, table: dict[str, Any], name: str, default: object = None) -> tuple[str, ...]:
    values = table.get(name, default)
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        raise ModelError(
            f"{name!r} in {path} must be a list of strings, got {values!r:.60}; correct or delete the file"
        )
    return tuple(values)


def _string(path: Path, table: dict[str, Any], name: str, default: str) -> str:
    value = table.get(name, default)
    if not isinstance(value, str):
        raise ModelError(f"{name!r} in {path} must be a string, got {value!r:.60}; correct or delete the file")
    return value
