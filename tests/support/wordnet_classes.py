"""Writes the word list of `fisedit.prompts.noun_classes` from WordNet's database.

`python -m tests.support.wordnet_classes FOLDER > fisedit/masking/noun_classes.txt`, where FOLDER holds `data.noun`,
`index.noun`, `data.adj` and `index.adj` of WordNet 3.0 (Debian's `wordnet-base` puts them into /usr/share/wordnet). A
noun's classes follow from the hypernyms of its first senses; an adjective has the class of the noun that it derives
from. Nothing is chosen word by word.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LICENSE = """\
; Words by class, from WordNet 3.0 by tests/support/wordnet_classes.py; "class: word word ...", "_" joins the words of
; one name. WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved. THIS SOFTWARE AND DATABASE IS
; PROVIDED "AS IS" AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES, EXPRESS OR IMPLIED. Permission to
; use, copy, modify and distribute this software and database and its documentation for any purpose and without fee or
; royalty is hereby granted, provided that this notice, the disclaimer and the above copyright notice appear on all
; copies; the name of Princeton University may not be used in advertising or publicity pertaining to distribution of the
; software or database.
"""

Root = tuple[str, int]
"""A lemma and which of its senses, from 1."""

ROOTS: dict[str, tuple[Root, ...]] = {
    "place": (
        *(("building", 1), ("building_complex", 1), ("establishment", 4), ("room", 1), ("facility", 1)),
        *(("geological_formation", 1), ("body_of_water", 1), ("land", 4), ("tract", 1), ("way", 6), ("excavation", 3)),
        *(("biome", 1), ("vegetation", 1), ("geographical_area", 1), ("district", 1), ("platform", 1), ("island", 1)),
        *(("workplace", 1), ("municipality", 1), ("housing", 1), ("yard", 2), ("outer_space", 1), ("seaside", 1)),
    ),
    "weather": (("weather", 1), ("atmospheric_phenomenon", 1), ("atmospheric_state", 1)),
    "time": (("time_period", 1), ("clock_time", 1), ("day", 4), ("season", 1), ("calendar_month", 1), ("sunlight", 1)),
    "style": (("artistic_movement", 1), ("artistic_style", 1), ("genre", 1), ("art_form", 1), ("fine_arts", 1)),
    "part": (("part", 1), ("part", 2), ("part", 3), ("body_part", 1), ("group", 1), ("measure", 2)),
    "medium": (("art", 1), ("picture", 1), ("picture", 2), ("needlework", 1), ("photograph", 1), ("sculpture", 1)),
}
"""Class -> the synsets below which its nouns lie."""

FIRST_SENSES = {"place": 3, "weather": 1, "time": 1, "style": 2, "medium": 2, "part": 3}
"""How many of a noun's senses count for a class, commonest first: "in a X" selects a place, other contexts do not."""

TANGIBLE = (("clothing", 1), ("container", 1), ("furniture", 1), ("furnishing", 2), ("instrument", 1), ("cage", 1))
TANGIBLE += (("plumbing_fixture", 1), ("conduit", 1), ("plant", 2), ("animal", 1))
"""What grows, stands or is worn in a place: with such an earlier sense a noun is no place."""

PHYSICAL_FILES = (5, 6, 8, 13, 18, 20)
"""WordNet's files of animals, artifacts, body parts, food, persons and plants; their common nouns are things."""

DERIVATIONS = ("\\", "+")


@dataclass(frozen=True)
class Synset:
    """A set of words of one sense.

    Args:
        file: number of the file that it was edited in, its topic.
        words: of one sense.
        hypernyms: keys of more general synsets.
        derived: keys of the nouns' synsets that its words derive from or pertain to.
    """

    file: int
    words: tuple[str, ...]
    hypernyms: tuple[str, ...]
    derived: tuple[str, ...]


def read_synsets(path: Path) -> dict[str, Synset]:
    """The synsets of a `data.*` file, by key.

    Args:
        path: of the file.
    """
    lines = (line.split(" | ")[0].split() for line in path.read_text().splitlines() if not line.startswith("  "))
    return {fields[0]: _synset(fields) for fields in lines}


def _synset(fields: list[str]) -> Synset:
    after = 4 + 2 * int(fields[3], 16)
    pointers = [fields[after + 1 + 4 * i : after + 5 + 4 * i] for i in range(int(fields[after]))]
    return Synset(
        int(fields[1]),
        tuple(fields[4:after:2]),
        tuple(key for symbol, key, *_ in pointers if symbol in ("@", "@i")),
        tuple(key for symbol, key, part, _ in pointers if symbol in DERIVATIONS and part == "n"),
    )


def read_senses(path: Path) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Lemma -> keys of its senses, commonest first, and whether the word occurs in WordNet's tagged texts.

    Args:
        path: of an `index.*` file.
    """
    lines = (line.split() for line in path.read_text().splitlines() if not line.startswith("  "))
    return {fields[0]: (tuple(fields[-int(fields[2]) :]), int(fields[-int(fields[2]) - 1]) > 0) for fields in lines}


@dataclass(frozen=True)
class WordNet:
    """WordNet's nouns and adjectives.

    Args:
        folder: of the database.
    """

    folder: Path

    @cached_property
    def nouns(self) -> dict[str, Synset]:
        """By key."""
        return read_synsets(self.folder / "data.noun")

    @cached_property
    def senses(self) -> dict[str, tuple[tuple[str, ...], bool]]:
        """Of nouns."""
        return read_senses(self.folder / "index.noun")

    @cached_property
    def roots(self) -> dict[str, str]:
        """Key -> class of the synsets in `ROOTS`, and "tangible"."""
        listed = [(name, root) for name, roots in (*ROOTS.items(), ("tangible", TANGIBLE)) for root in roots]
        return {self.senses[lemma][0][sense - 1]: name for name, (lemma, sense) in listed}

    def classes_of(self, key: str) -> set[str]:
        """The classes of a synset: of it and of all above it."""
        own = {self.roots[key]} if key in self.roots else set()
        return own.union(*(self.classes_of(up) for up in self.nouns[key].hypernyms))

    def noun_classes(self, lemma: str) -> set[str]:
        """The classes of a noun's first senses; a place has no earlier tangible sense."""
        keys, common = self.senses[lemma]
        found: set[str] = set()
        for rank, key in enumerate(keys[: max(FIRST_SENSES.values())]):
            now = {name for name in self.classes_of(key) if rank < FIRST_SENSES.get(name, len(keys))}
            found |= now - ({"place"} if "tangible" in found | now else set())
        physical = "_" not in lemma and self.nouns[keys[0]].file in PHYSICAL_FILES
        if physical and (common or "tangible" in found) and "medium" not in found:
            found.add("thing")
        return found - {"tangible"}

    def adjectives(self) -> dict[str, set[str]]:
        """Adjective -> the classes weather, time and style of the nouns that its first sense derives from."""
        synsets = read_synsets(self.folder / "data.adj")
        found: dict[str, set[str]] = {}
        for lemma, (keys, _) in read_senses(self.folder / "index.adj").items():
            sources = synsets[keys[0]].derived
            found[lemma] = set().union(*(self.classes_of(key) for key in sources)) & {"weather", "time", "style"}
        return found


def word_list(folder: Path) -> str:
    """The text of the word list."""
    wordnet = WordNet(folder)
    by_class: dict[str, list[str]] = {name: [] for name in (*ROOTS, "thing", "adjective")}
    for lemma in wordnet.senses:
        if lemma.replace("_", "").replace("-", "").isalpha() and lemma.count("_") < 2 and len(lemma) > 2:
            for name in wordnet.noun_classes(lemma):
                by_class[name].append(lemma)
    by_class["part"] = [lemma for lemma in by_class["part"] if wordnet.senses[lemma][1] and "_" not in lemma]
    for lemma, classes in wordnet.adjectives().items():
        for name in (*classes, *(["adjective"] if classes else [])):
            by_class[name].append(lemma)
    return LICENSE + "".join(f"{name}: {' '.join(sorted(set(words)))}\n" for name, words in by_class.items())


if __name__ == "__main__":
    sys.stdout.write(word_list(Path(sys.argv[1])))
