"""Reads properties of an XMP packet, and cuts others out; every other byte stays. Knows XML, no image library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

_SEPARATOR, _END = " ", b"</"
_VALUE = rb"\s*=\s*(?:\"[^\"]*\"|'[^']*')"

Name = tuple[str, str]
"""A namespace and a name in it."""

_NO_UTF8 = (b"\xfe\xff", b"\xff\xfe", b"\0")


class _DeclaresEntities(Exception):
    """A packet with entities of its own, which may be of any size."""


@dataclass
class _Tag:
    """An element of a packet.

    Args:
        name: Its name.
        attributes: Its attributes.
        start: The first byte of its start tag.
        words: Pieces of text before it.
        stop: The byte behind its end tag.
        words_inside: Pieces of text before its end.
    """

    name: Name
    attributes: dict[Name, str]
    start: int
    words: int
    stop: int = 0
    words_inside: int = 0


@dataclass
class _Packet:
    """The contents of a packet.

    Args:
        tags: Its elements, in order.
        words: Its pieces of text.
        prefixes: Prefix and namespace of every declaration.
    """

    tags: list[_Tag] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    prefixes: set[Name] = field(default_factory=set)


def is_readable(packet: bytes) -> bool:
    """Return whether a packet is XML in UTF-8 without entities of its own."""
    return _parse(packet) is not None


def read_property(packet: bytes, name: Name) -> str:
    """The first value of a property, an attribute's or the words inside an element; "" if there is none."""
    parsed = _parse(packet) or _Packet()
    for tag in parsed.tags:
        if tag.name == name:
            return "".join(parsed.words[tag.words : tag.words_inside]).strip()
        if name in tag.attributes:
            return tag.attributes[name]
    return ""


def without(packet: bytes, is_unwanted: Callable[[str, str], bool]) -> bytes:
    """A readable packet without some of its properties.

    Args:
        packet: The packet.
        is_unwanted: Called with the namespace and the name of a property, and with a namespace and "" for its
            declaration.
    """
    parsed = _parse(packet) or _Packet()
    kept, at = [], 0
    for start, stop in sorted(_cuts(packet, parsed, is_unwanted)):
        kept.append(packet[at:start])
        at = max(at, stop)
    return b"".join([*kept, packet[at:]])


def _cuts(packet: bytes, parsed: _Packet, is_unwanted: Callable[[str, str], bool]) -> Iterator[tuple[int, int]]:
    """First byte and end of what is cut out."""
    for tag in parsed.tags:
        if is_unwanted(*tag.name):
            yield tag.start, tag.stop
        for namespace, local in (name for name in tag.attributes if is_unwanted(*name)):
            prefixes = "|".join(re.escape(prefix) for prefix, uri in sorted(parsed.prefixes) if uri == namespace)
            if match := re.compile(rf"\s+(?:{prefixes}):{re.escape(local)}".encode() + _VALUE).search(
                packet, tag.start
            ):
                yield match.span()
    for prefix in (prefix for prefix, uri in parsed.prefixes if is_unwanted(uri, "")):
        yield from (match.span() for match in re.finditer(rf"\s+xmlns:{re.escape(prefix)}".encode() + _VALUE, packet))


def _parse(packet: bytes) -> _Packet | None:
    parsed, path = _Packet(), list[_Tag]()
    parser = expat.ParserCreate(namespace_separator=_SEPARATOR)
    parser.buffer_text = True

    def on_start(tag: str, attributes: dict[str, str]) -> None:
        named = {_name(key): value for key, value in attributes.items()}
        path.append(_Tag(_name(tag), named, parser.CurrentByteIndex, len(parsed.words)))
        parsed.tags.append(path[-1])

    def on_end(_: str) -> None:
        tag, at = path.pop(), parser.CurrentByteIndex
        tag.words_inside = len(parsed.words)
        tag.stop = packet.index(b">", at) + 1 if packet.startswith(_END, at) else at  # an empty element has one tag

    def on_prefix(prefix: str | None, uri: str | None) -> None:
        parsed.prefixes.add((prefix or "", uri or ""))

    def on_entity(*_: object) -> None:
        raise _DeclaresEntities

    parser.StartElementHandler, parser.EndElementHandler = on_start, on_end
    parser.CharacterDataHandler, parser.StartNamespaceDeclHandler = parsed.words.append, on_prefix
    parser.EntityDeclHandler = on_entity
    try:
        parser.Parse(packet.rstrip(b"\0 \r\n\t"), True)
    except (expat.ExpatError, _DeclaresEntities, ValueError):
        return None
    return None if packet.startswith(_NO_UTF8) else parsed


def _name(text: str) -> Name:
    namespace, _, local = text.rpartition(_SEPARATOR)
    return namespace, local
