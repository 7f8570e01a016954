"""Reads prompts and settings out of the graph of nodes that ComfyUI writes into pictures. Knows JSON alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fisedit.errors import InputError

Graph = Mapping[str, Any]
_TEXTS = ("text", "string", "value", "prompt", "text_g", "text_l", "text_positive")
_SETTINGS = ("steps", "cfg", "seed", "noise_seed", "sampler_name", "scheduler")
_SIDES = ((0, "positive"), (1, "negative"))
_MAX_LINKS = 200


def read_graph(graph: Graph) -> tuple[str, str, dict[str, Any]]:
    """The prompt, the negative prompt, and the settings of a graph, as its sampler names them.

    Args:
        graph: Node's name -> {"class_type", "inputs"}.

    Raises:
        InputError: No sampler with two prompts, samplers with different ones, or prompts that nodes put together.
    """
    found = list(_samplers(graph))
    prompts = {tuple(_text(graph, inputs[side], slot) for slot, side in _SIDES) for inputs in found}
    if len(prompts) != 1:
        told = "none" if not prompts else f"{len(prompts)} of them"
        raise InputError(f"ComfyUI's graph in the picture must have one prompt, got {told}; edit it as --picture")
    first = max(found, key=lambda inputs: _number(inputs.get("denoise", 1)))
    settings = {name: _value(graph, first[name]) for name in _SETTINGS if name in first}
    ((prompt, negative),) = prompts
    return prompt, negative, settings | _size(graph, first.get("latent_image"))


def _samplers(graph: Graph) -> Iterator[Mapping[str, Any]]:
    """Inputs of the nodes that denoise by two prompts."""
    for node in graph.values():
        inputs = _inputs(node)
        if {"positive", "negative"} <= set(inputs) and {"seed", "noise_seed"} & set(inputs):
            yield inputs


def _inputs(node: Any) -> Mapping[str, Any]:
    inputs = node.get("inputs") if isinstance(node, dict) else None
    return inputs if isinstance(inputs, dict) else {}


def _node(graph: Graph, link: Any) -> Mapping[str, Any]:
    """The node that a link [name, slot] leads to."""
    node = graph.get(str(link[0])) if isinstance(link, list) and len(link) == 2 else None
    if not isinstance(node, dict):
        raise InputError("ComfyUI's graph in the picture must be whole, got a link to nowhere; edit it as --picture")
    return node


def _text(graph: Graph, link: Any, side: int, depth: int = 0) -> str:
    """The words that a link to a conditioning, or to a text, stands for."""
    if isinstance(link, str):
        return link
    node = _node(graph, link)
    kind, inputs = str(node.get("class_type")), _inputs(node)
    if kind == "ConditioningZeroOut":
        return ""
    slot = link[1] if link[1] in (0, 1) else side
    through = [inputs[name] for name in ("conditioning", _SIDES[slot][1]) if isinstance(inputs.get(name), list)]
    words = [inputs[name] for name in _TEXTS if isinstance(inputs.get(name), str | list)]
    texts = through[:1] or [word for number, word in enumerate(words) if word not in words[:number]]
    if len(texts) != 1 or depth > _MAX_LINKS:
        raise InputError(
            f"ComfyUI's graph in the picture must tell its prompt in one node, got {kind:.40}; edit it as --picture"
        )
    return _text(graph, texts[0], slot, depth + 1)


def _value(graph: Graph, value: Any) -> Any:
    """A setting, or what the node that it is linked to holds alone."""
    if not isinstance(value, list):
        return value
    held = [each for each in _inputs(_node(graph, value)).values() if isinstance(each, int | float | str)]
    return held[0] if held else None


def _size(graph: Graph, link: Any) -> dict[str, Any]:
    """Width and height of the empty latents that a sampler begins with."""
    inputs = _inputs(graph.get(str(link[0]))) if isinstance(link, list) and link else {}
    return {name: _value(graph, inputs[name]) for name in ("width", "height") if name in inputs}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
