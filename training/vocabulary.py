"""The words that a drawn scene may use. Knows nothing of layout, pixels or models."""

from dataclasses import dataclass

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Thing:
    """One object: its word, its glyph, and whether it flies or stands on the ground."""

    word: str
    glyph: str
    in_sky: bool = False
    article: str = "a"


@dataclass(frozen=True)
class Hill:
    """One layer of ground below the horizon.

    `drop` is its distance below the horizon and `swell` the height of its waves, both in cells (1/16 of the side);
    `waves` is how many waves cross the picture, `turn` where they start (in turns).
    """

    top: Rgb
    bottom: Rgb
    drop: float = 0.0
    swell: float = 0.0
    waves: float = 1.0
    turn: float = 0.0


@dataclass(frozen=True)
class Background:
    """One place or time of day: its word, the phrase that names it, and its colours from top to bottom."""

    word: str
    phrase: str
    sky_top: Rgb
    sky_bottom: Rgb
    hills: tuple[Hill, ...]
    stars: bool = False


THINGS = (
    Thing("cat", "🐱"),
    Thing("dog", "🐶"),
    Thing("fox", "🦊"),
    Thing("panda", "🐼"),
    Thing("frog", "🐸"),
    Thing("lion", "🦁"),
    Thing("cake", "🎂"),
    Thing("pumpkin", "🎃"),
    Thing("mushroom", "🍄"),
    Thing("car", "🚗"),
    Thing("castle", "🏰"),
    Thing("tree", "🌳"),
    Thing("robot", "🤖"),
    Thing("gift", "🎁"),
    Thing("sun", "🌞", in_sky=True, article="the"),
    Thing("moon", "🌝", in_sky=True, article="the"),
    Thing("rocket", "🚀", in_sky=True),
    Thing("balloon", "🎈", in_sky=True),
)

BACKGROUNDS = (
    Background(
        "beach",
        "on a beach",
        (90, 176, 240),
        (196, 230, 250),
        (
            Hill((40, 130, 200), (60, 160, 215)),
            Hill((240, 220, 165), (225, 195, 130), drop=2.0, swell=0.35, waves=0.8),
        ),
    ),
    Background(
        "snow",
        "in the snow",
        (165, 188, 222),
        (216, 226, 240),
        (
            Hill((222, 231, 244), (226, 234, 246), swell=0.8, waves=1.3, turn=0.4),
            Hill((246, 249, 253), (226, 234, 246), drop=2.0, swell=0.5, waves=0.9),
        ),
    ),
    Background(
        "grass",
        "on the grass",
        (100, 178, 242),
        (190, 224, 250),
        (
            Hill((112, 184, 90), (96, 172, 78), swell=0.8, waves=1.1, turn=0.2),
            Hill((86, 164, 66), (58, 132, 48), drop=1.6, swell=0.5, waves=0.8, turn=0.7),
        ),
    ),
    Background(
        "night",
        "at night",
        (14, 18, 62),
        (58, 54, 124),
        (Hill((34, 52, 66), (18, 34, 44), swell=0.5, waves=1.2, turn=0.1),),
        stars=True,
    ),
    Background(
        "sunset",
        "at sunset",
        (250, 112, 84),
        (255, 206, 128),
        (
            Hill((150, 76, 100), (140, 70, 95), swell=0.9, waves=1.4, turn=0.3),
            Hill((104, 54, 82), (70, 38, 66), drop=1.8, swell=0.5, waves=0.8, turn=0.8),
        ),
    ),
    Background(
        "desert",
        "in the desert",
        (248, 206, 136),
        (254, 236, 190),
        (
            Hill((226, 160, 86), (220, 150, 80), swell=0.9, waves=1.2, turn=0.6),
            Hill((206, 130, 66), (176, 102, 52), drop=1.8, swell=0.7, waves=0.7, turn=0.1),
        ),
    ),
    Background(
        "sea",
        "by the sea",
        (120, 200, 244),
        (214, 240, 252),
        (
            Hill((30, 120, 190), (26, 108, 180)),
            Hill((24, 96, 168), (20, 82, 152), drop=2.2, swell=0.25, waves=3.0),
            Hill((18, 74, 142), (12, 54, 116), drop=4.4, swell=0.25, waves=3.0, turn=0.5),
        ),
    ),
)

THING = {thing.word: thing for thing in THINGS}
BACKGROUND = {background.word: background for background in BACKGROUNDS}
GROUND_WORDS = tuple(thing.word for thing in THINGS if not thing.in_sky)
SKY_WORDS = tuple(thing.word for thing in THINGS if thing.in_sky)
