"""Textual inversion (arXiv 2208.01618): words whose embeddings a file holds, put into a pipeline by diffusers' loader.

Automatic1111's and diffusers' .safetensors files are read. A word of several vectors takes as many tokens. Knows files
and pipelines.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fisedit.errors import AdapterError, InputError, ModelError, PromptError, SessionError
from fisedit.machine.device import default_torch_state
from fisedit.models.families.family import text_encoders
from fisedit.models.injection import exclusive
from fisedit.models.loader import quiet_loaders
from fisedit.models.paths import expand_home
from fisedit.models.validation import pickled
from fisedit.models.weight_files import Shapes, read_shapes
from fisedit.prompts.chunks import MAX_CHUNKS, added_tokens, split_chunks
from fisedit.prompts.syntax import named_embeddings
from fisedit.prompts.weighting import parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from fisedit.machine.model import Model
    from fisedit.values import GenerationConfig

_TOKEN = re.compile(r"[^\W_][\w-]*|<[\w-]+>")
_NO_WORDS = ("emb_params", "*", "string_to_param.*", "clip_l", "text_encoders_0")
"""Names of the first tensor of files that tell no word."""

_PAIRS = (("clip_l", "clip_g"), ("text_encoders_0", "text_encoders_1"))
"""Names of the tensors of a word for two text encoders, in files of web UIs and of diffusers' trainers."""

_VECTOR = re.compile(r"_[0-9]+>?$")  # how diffusers names further vectors

_loaded: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
"""Text encoder -> words that were loaded here and the first digits of their files' SHA-256."""


def loaded(pipe: Model) -> Mapping[str, str]:
    """Words that were loaded here, and the first digits of their files' SHA-256.

    Args:
        pipe: The pipeline that has them.
    """
    return _loaded.get(pipe.text_encoder, {})


@default_torch_state()
def load(pipe: Model, source: str | Path, token: str | None = None) -> str:
    """Load the embeddings of a word.

    Args:
        pipe: The pipeline that gets them.
        source: a .safetensors file with a tensor of a word, [D] or [vectors, D], for each text encoder.
        token: the word, which chooses among several of the file; None for the file's name, or the word in diffusers'
            "learned_embeds". Its case does not matter, and it is found inside longer words, too.

    Returns:
        The word in lower case.

    Raises:
        AdapterError: no such file, no embeddings, those of another model, or a word that is known already.
        InputError: a word that is none.
    """
    from safetensors.torch import load

    file = expand_home(source)
    names = _check_file(pipe, file, token)
    name = names[0]
    word = (name if file.stem == "learned_embeds" and name not in _NO_WORDS else file.stem) if token is None else token
    if not isinstance(word, str):
        raise InputError(f"token must be text, got {type(word).__name__}; give a word")
    word = word.lower()
    if not _TOKEN.fullmatch(word) or _VECTOR.search(word):
        example = "letters, digits, '-' or '_', without _ and a number at the end"
        raise InputError(f"token must be {example}, got {word!r:.60}; give another as token=")
    data = file.read_bytes()
    embeddings = [load(data)[name] for name in names]
    if not all(each.is_floating_point() and each.isfinite().all() for each in embeddings):
        raise AdapterError(f"{file} holds numbers that are no embeddings; get the file again")
    with exclusive(pipe.text_encoder, pipe.tokenizer), quiet_loaders():
        vocabulary = pipe.tokenizer.get_vocab()
        if word in loaded(pipe) or word in vocabulary or f"{word}</w>" in vocabulary:
            raise AdapterError(f"the text encoder knows the word {word!r} already; give another as token=")
        try:
            for each, own in zip(embeddings, _encoders(pipe), strict=True):
                pipe.load_textual_inversion({word: each}, token=word, **own)
        except (ValueError, RuntimeError) as error:
            why = next(iter(str(error).splitlines()), "")[:200]
            raise AdapterError(f"{file} cannot be loaded ({why}); load what was made for this model") from error
        pipe.text_encoder.requires_grad_(False)
        _loaded[pipe.text_encoder] = {**loaded(pipe), word: hashlib.sha256(data).hexdigest()[:8]}
    return word


def own_word(file: Path) -> str | None:
    """Return the word that a file tells, as diffusers' files do, or None; a file that cannot be read has none.

    Args:
        file: The file, as in `load`.
    """
    if pickled(file) or not file.is_file():
        return None
    names = list(read_shapes(file))
    return names[0] if len(names) == 1 and names[0] not in _NO_WORDS else None


@default_torch_state()
def unload(pipe: Model, token: str) -> None:
    """Take the embeddings of a word out.

    Args:
        pipe: The pipeline that has them.
        token: the word, in any case.

    Raises:
        AdapterError: no such word was loaded.
    """
    word = str(token).lower()
    with exclusive(pipe.text_encoder, pipe.tokenizer), quiet_loaders():
        if word not in loaded(pipe):
            words = ", ".join(loaded(pipe)) or "none"
            raise AdapterError(f"no textual inversion of the word {token!r} is loaded; loaded: {words}")
        tokens = added_tokens(pipe.tokenizer)[word]
        for own in _encoders(pipe):
            for one in tokens:
                pipe.unload_textual_inversion(one, **own)
            embeddings = own["text_encoder"].get_input_embeddings()
            embeddings.requires_grad_(False)  # diffusers made them anew
            own["text_encoder"].config.vocab_size = embeddings.num_embeddings
        _loaded[pipe.text_encoder] = {name: digest for name, digest in loaded(pipe).items() if name != word}


def used(pipe: Model, config: GenerationConfig, prompts: Sequence[str] = ()) -> tuple[str, ...]:
    """The loaded words that a config's prompts hold, each as "word:digest", sorted.

    Args:
        pipe: The pipeline that has them.
        config: The config of a picture; its negative prompt counts where it is read.
        prompts: further ones, of regions.
    """
    words = loaded(pipe)
    if not words:
        return ()
    found: set[str] = set()
    with exclusive(pipe.tokenizer):
        for prompt in (config.prompt, config.negative_prompt if config.guided else "", *prompts):
            for chunk in split_chunks(parse(prompt), pipe.tokenizer)[:MAX_CHUNKS]:
                found |= {token.lower() for token in pipe.tokenizer.tokenize(chunk.text)} & words.keys()
    return tuple(sorted(f"{word}:{words[word]}" for word in found))


def check_words(pipe: Model, config: GenerationConfig, prompts: Sequence[str] = ()) -> None:
    """Raise SessionError if a config's prompts would now be read with other words than they were.

    Args:
        pipe: The pipeline that reads them.
        config: The config of a picture.
        prompts: further ones, of its regions.
    """
    if (words := used(pipe, config, prompts)) != config.textual_inversions:
        then, now = (", ".join(names) or "none" for names in (config.textual_inversions, words))
        raise SessionError(
            f"the prompt {config.prompt!r:.60} was read with the textual inversions {then}, "
            f"which now are {now}; load or unload them"
        )


def check_named(pipe: Model, prompt: str, name: str = "prompt") -> None:
    """Raise PromptError for a word that a prompt names by `embedding:` and that is not loaded.

    Args:
        pipe: The pipeline that has words.
        prompt: any text.
        name: for the message.
    """
    if not (named := named_embeddings(prompt)):
        return
    with exclusive(pipe.tokenizer):
        known = {word.lower() for word in added_tokens(pipe.tokenizer)}
    if missing := next((each for each in named if each.lower() not in known), None):
        words = ", ".join(sorted(known)[:8]) or "none"
        raise PromptError(
            f"{name} has embedding:{missing:.60}, which is not loaded; load it first; loaded: {words:.200}"
        )


def _encoders(pipe: Model) -> list[dict[str, Any]]:
    """The tokenizers and text encoders, as diffusers' loader takes them."""
    return [{"tokenizer": tokenizer, "text_encoder": encoder} for tokenizer, encoder in text_encoders(pipe.components)]


def _check_file(pipe: Model, file: Path, token: object) -> tuple[str, ...]:
    """The names of a file's tensors of a word, for each text encoder: the only ones, or the token's own."""
    if problem := pickled(file):
        raise AdapterError(str(problem))
    if not file.is_file():
        raise AdapterError(f"textual inversion must be a .safetensors file, got {file}: no such file")
    try:
        shapes = read_shapes(file)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    widths = [int(own["text_encoder"].config.hidden_size) for own in _encoders(pipe)]
    if len(widths) > 1:
        return _check_pair(file, shapes, widths)
    (width,) = widths
    name = token if isinstance(token, str) and token in shapes else next(iter(shapes), "")
    shape = shapes.get(name, ())
    if "clip_g" in shapes:
        raise AdapterError(f"{file} is a textual inversion for Stable Diffusion XL; load one for this model")
    if not shapes or not all(1 <= len(each) <= 2 and 0 not in each for each in shapes.values()):
        raise AdapterError(f"{file} must hold embeddings of words, got {len(shapes)} other tensors; load another file")
    if len(shapes) > 1 and name != token:
        words = f"{', '.join(list(shapes)[:3])[:200]}{' and more' * (len(shapes) > 3)}"
        raise AdapterError(f"{file} holds {len(shapes)} words, or no textual inversion: {words}; name one as token=")
    if shape[-1] != width:
        raise AdapterError(f"{file} is for text encoders of width {shape[-1]}, this model's has {width}; load another")
    return (name,)


def _check_pair(file: Path, shapes: Shapes, widths: Sequence[int]) -> tuple[str, ...]:
    """The names of a file's tensors of its one word for two text encoders."""
    names = next((pair for pair in _PAIRS if set(pair) == set(shapes)), None)
    if names is None:
        raise AdapterError(
            f"{file} must hold a word for two text encoders (clip_l and clip_g), got {', '.join(shapes)[:80]}; "
            "load a textual inversion for Stable Diffusion XL"
        )
    found = [shapes[name] for name in names]
    vectors = {shape[0] if len(shape) > 1 else 1 for shape in found}
    if [shape[-1] for shape in found] != list(widths) or len(vectors) > 1 or any(len(shape) > 2 for shape in found):
        raise AdapterError(
            f"{file} must hold as many vectors of widths {widths[0]} and {widths[1]}, got {found[0]} and {found[1]}; "
            "load one for this model"
        )
    return names
