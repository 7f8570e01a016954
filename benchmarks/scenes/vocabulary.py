"""The words of drawn scenes: objects, backgrounds, weather. Knows nothing of layout, pixels or models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class ObjectKind:
    """A kind of object.

    Args:
        word: its noun.
        glyph: its emoji.
        family: animal, food, vehicle, building, plant, thing or sky.
        colours: whether it can have one of `COLOURS`.
        wears: whether it can wear one of `ACCESSORIES`.
        takes_definite_article: whether its article is "the", as of the sun.
    """

    word: str
    glyph: str
    family: str
    colours: bool = False
    wears: bool = False
    takes_definite_article: bool = False

    @property
    def in_sky(self) -> bool:
        """Return whether it is in the sky instead of on the ground."""
        return self.family == "sky"


@dataclass(frozen=True)
class Hill:
    """One layer of ground below the horizon.

    Args:
        top: colour at its edge.
        bottom: colour at the bottom of the picture.
        drop: distance below the horizon, in cells of 1/32 of the side.
        amplitude: height of its waves, in cells.
        waves: number of waves across the picture.
        phase: phase of the waves, in turns.
        shape: wave, peaks or blocks.
    """

    top: Rgb
    bottom: Rgb
    drop: float = 0.0
    amplitude: float = 0.0
    waves: float = 1.0
    phase: float = 0.0
    shape: str = "wave"


@dataclass(frozen=True)
class Background:
    """A place or time of day.

    Args:
        word: its name.
        phrases: The phrases of prompts, the plainest first.
        sky_top: colour at the top of the picture.
        sky_bottom: colour at the horizon.
        hills: layers of ground, from back to front.
        stars: whether the sky has stars.
    """

    word: str
    phrases: tuple[str, ...]
    sky_top: Rgb
    sky_bottom: Rgb
    hills: tuple[Hill, ...]
    stars: bool = False


@dataclass(frozen=True)
class Weather:
    """Rain, snow or fog.

    Args:
        word: its name.
        phrases: The phrases of prompts, the plainest first.
        tint: colour that the picture is blended with.
    """

    word: str
    phrases: tuple[str, ...]
    tint: Rgb


def _object_kinds(
    family: str, glyphs: str, *, colours: str = "", wears: bool = False, takes_definite_article: str = ""
) -> tuple[ObjectKind, ...]:
    pairs = [pair.split(":") for pair in glyphs.split()]
    return tuple(
        ObjectKind(w, g, family, w in colours.split(), wears, w in takes_definite_article.split()) for w, g in pairs
    )


OBJECTS = (
    *_object_kinds(
        "animal",
        "cat:🐱 dog:🐶 fox:🦊 panda:🐼 frog:🐸 lion:🦁 bear:🐻 rabbit:🐰 monkey:🐵 pig:🐷 cow:🐮 koala:🐨 tiger:🐯",
        wears=True,
    ),
    *_object_kinds("animal", "owl:🦉 penguin:🐧 chick:🐤 turtle:🐢 elephant:🐘 fish:🐠"),
    *_object_kinds(
        "food",
        "cake:🎂 pumpkin:🎃 mushroom:🍄 apple:🍎 pizza:🍕 burger:🍔 donut:🍩 banana:🍌 strawberry:🍓 pineapple:🍍",
        colours="apple mushroom",
    ),
    *_object_kinds(
        "vehicle", "car:🚗 bus:🚌 tractor:🚜 train:🚂 truck:🚚 bicycle:🚲 boat:⛵", colours="car tractor truck"
    ),
    *_object_kinds("building", "castle:🏰 house:🏠 tent:⛺ church:⛪ fountain:⛲"),
    *_object_kinds("plant", "tree:🌳 cactus:🌵 palm:🌴 tulip:🌷 sunflower:🌻 pine:🌲", colours="tulip"),
    *_object_kinds(
        "thing",
        "robot:🤖 gift:🎁 guitar:🎸 book:📕 clock:⏰ drum:🥁 chair:🪑 ball:⚽ umbrella:☂ heart:❤ teddy:🧸 snowman:⛄ "
        "ghost:👻 trophy:🏆 bell:🔔",
        colours="book heart umbrella guitar clock",
    ),
    *_object_kinds(
        "sky",
        "sun:🌞 moon:🌝 rocket:🚀 balloon:🎈 cloud:☁ rainbow:🌈 plane:🛩 helicopter:🚁 star:⭐ butterfly:🦋",
        colours="balloon butterfly",
        takes_definite_article="sun moon",
    ),
)
"""Objects by family."""

ACCESSORIES = {"hat": "🎩", "crown": "👑", "bow": "🎀"}
"""Accessory -> its emoji."""

COLOURS = {"red": 2.0, "yellow": 50.0, "green": 130.0, "blue": 215.0, "purple": 280.0, "pink": 330.0}
"""Colour word -> hue in degrees."""

SCALES = ("big", "small")
"""Words for size; an object without one has the size of the others."""

BACKGROUNDS = (
    Background(
        "beach",
        ("on a beach", "at the beach", "on a sandy beach"),
        (90, 176, 240),
        (196, 230, 250),
        (
            Hill((40, 130, 200), (60, 160, 215)),
            Hill((240, 220, 165), (225, 195, 130), drop=4.0, amplitude=0.7, waves=0.8),
        ),
    ),
    Background(
        "snow",
        ("in the snow", "in a snowy field"),
        (165, 188, 222),
        (216, 226, 240),
        (
            Hill((222, 231, 244), (226, 234, 246), amplitude=1.6, waves=1.3, phase=0.4),
            Hill((246, 249, 253), (226, 234, 246), drop=4.0, amplitude=1.0, waves=0.9),
        ),
    ),
    Background(
        "grass",
        ("on the grass", "on a lawn", "in a meadow"),
        (100, 178, 242),
        (190, 224, 250),
        (
            Hill((112, 184, 90), (96, 172, 78), amplitude=1.6, waves=1.1, phase=0.2),
            Hill((86, 164, 66), (58, 132, 48), drop=3.2, amplitude=1.0, waves=0.8, phase=0.7),
        ),
    ),
    Background(
        "night",
        ("at night", "on a starry night"),
        (14, 18, 62),
        (58, 54, 124),
        (Hill((34, 52, 66), (18, 34, 44), amplitude=1.0, waves=1.2, phase=0.1),),
        stars=True,
    ),
    Background(
        "sunset",
        ("at sunset", "in the evening light"),
        (250, 112, 84),
        (255, 206, 128),
        (
            Hill((150, 76, 100), (140, 70, 95), amplitude=1.8, waves=1.4, phase=0.3),
            Hill((104, 54, 82), (70, 38, 66), drop=3.6, amplitude=1.0, waves=0.8, phase=0.8),
        ),
    ),
    Background(
        "desert",
        ("in the desert", "among sand dunes"),
        (248, 206, 136),
        (254, 236, 190),
        (
            Hill((226, 160, 86), (220, 150, 80), amplitude=1.8, waves=1.2, phase=0.6),
            Hill((206, 130, 66), (176, 102, 52), drop=3.6, amplitude=1.4, waves=0.7, phase=0.1),
        ),
    ),
    Background(
        "sea",
        ("by the sea", "by the ocean"),
        (120, 200, 244),
        (214, 240, 252),
        (
            Hill((30, 120, 190), (26, 108, 180)),
            Hill((24, 96, 168), (20, 82, 152), drop=4.4, amplitude=0.5, waves=3.0),
            Hill((18, 74, 142), (12, 54, 116), drop=8.8, amplitude=0.5, waves=3.0, phase=0.5),
        ),
    ),
    Background(
        "forest",
        ("in the forest", "in the woods"),
        (150, 200, 190),
        (200, 226, 196),
        (
            Hill((44, 100, 72), (36, 88, 60), amplitude=2.6, waves=8.0, phase=0.3, shape="peaks"),
            Hill((98, 92, 52), (70, 62, 36), drop=4.0, amplitude=0.6, waves=0.9, phase=0.5),
        ),
    ),
    Background(
        "mountains",
        ("in the mountains", "before high mountains"),
        (120, 176, 226),
        (206, 224, 240),
        (
            Hill((150, 158, 184), (116, 126, 156), amplitude=4.5, waves=2.5, phase=0.4, shape="peaks"),
            Hill((122, 160, 98), (84, 124, 70), drop=4.4, amplitude=0.8, waves=1.1),
        ),
    ),
    Background(
        "city",
        ("in the city", "in a town street"),
        (176, 196, 214),
        (224, 222, 214),
        (
            Hill((122, 120, 138), (104, 104, 124), amplitude=3.5, waves=8.0, shape="blocks"),
            Hill((92, 94, 100), (66, 68, 74), drop=5.0),
        ),
    ),
    Background(
        "space",
        ("in space", "on a grey planet"),
        (8, 6, 20),
        (40, 20, 60),
        (
            Hill((128, 122, 134), (104, 98, 112), amplitude=1.2, waves=1.6, phase=0.2),
            Hill((152, 146, 156), (110, 104, 116), drop=3.4, amplitude=0.8, waves=0.7, phase=0.6),
        ),
        stars=True,
    ),
    Background(
        "room",
        ("in a room", "inside a house with a wooden floor"),
        (240, 214, 176),
        (248, 228, 198),
        (Hill((120, 76, 48), (120, 76, 48)), Hill((178, 120, 74), (146, 94, 56), drop=1.0)),
    ),
)

WEATHERS = (
    Weather("rain", ("in the rain", "on a rainy day"), (120, 132, 150)),
    Weather("snowfall", ("in falling snowflakes", "during a snowfall"), (226, 232, 242)),
    Weather("fog", ("in the fog", "on a foggy day"), (226, 228, 230)),
)

OBJECT = {object_kind.word: object_kind for object_kind in OBJECTS}
BACKGROUND = {background.word: background for background in BACKGROUNDS}
WEATHER = {weather.word: weather for weather in WEATHERS}
GROUND_WORDS = tuple(object_kind.word for object_kind in OBJECTS if not object_kind.in_sky)
SKY_WORDS = tuple(object_kind.word for object_kind in OBJECTS if object_kind.in_sky)


@dataclass(frozen=True)
class SceneVocabulary:
    """The words that sampled scenes may be of; those of one kind can be missing, all but objects and backgrounds.

    Args:
        ground: objects on the ground.
        sky: objects in the sky.
        colours: The colours, of `COLOURS`.
        scales: The scales, of `SCALES`.
        accessories: The accessories, of `ACCESSORIES`.
        backgrounds: The backgrounds, of `BACKGROUND`.
        weathers: The weathers, of `WEATHER`.
    """

    ground: tuple[str, ...]
    sky: tuple[str, ...]
    colours: tuple[str, ...]
    scales: tuple[str, ...]
    accessories: tuple[str, ...]
    backgrounds: tuple[str, ...]
    weathers: tuple[str, ...]

    @classmethod
    def from_filter(cls, is_known: Callable[[str], bool]) -> SceneVocabulary:
        """The words that are known; of a background or weather, those of its plainest phrase.

        Args:
            is_known: whether a word is.
        """

        def known_words(words: Iterable[str]) -> tuple[str, ...]:
            return tuple(filter(is_known, words))

        def known_places(places: tuple[Background, ...] | tuple[Weather, ...]) -> tuple[str, ...]:
            return tuple(place.word for place in places if all(map(is_known, place.phrases[0].split())))

        return cls(
            known_words(GROUND_WORDS),
            known_words(SKY_WORDS),
            known_words(COLOURS),
            known_words(SCALES),
            known_words(ACCESSORIES),
            known_places(BACKGROUNDS),
            known_places(WEATHERS),
        )


FULL_VOCABULARY = SceneVocabulary.from_filter(lambda _: True)
