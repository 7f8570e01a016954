"""Many people at once: everybody asks for a picture of their own, in the same moment."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from tests.support.app.program import Program, picture

if TYPE_CHECKING:
    from fisedit import Editor

PROMPTS = ("a cat and a cake on a beach", "a dog and a castle on a beach", "a rabbit in the snow")
SIDE, STEPS, GUIDANCE = 64, 2, 4.0


def expected(editor: Editor, people: int) -> list[np.ndarray]:
    """What everybody's picture should be: person number n has the seed n."""
    made = []
    for n in range(people):
        size = {"width": SIDE, "height": SIDE, "num_inference_steps": STEPS, "guidance_scale": GUIDANCE}
        made.append(np.asarray(editor.beside().generate(_prompt(n), seed=n, **size).image))
    return made


def ask(url: str, people: int) -> list[np.ndarray | None]:
    """Everybody's picture, None for those who were told that the app is busy, in those words."""

    programs = [Program(url, uuid.uuid4().hex) for _ in range(people)]

    def one(n: int) -> np.ndarray | None:
        answer = programs[n].send("generate", _prompt(n), n, STEPS, GUIDANCE, SIDE, SIDE)
        if answer.status_code == 503:
            assert answer.json()["detail"].startswith("error[busy]: "), answer.text
            return None
        assert answer.status_code == 200, answer.text
        return picture(list(programs[n].events("generate", answer))[-1])

    with ThreadPoolExecutor(people) as everybody:
        got = list(everybody.map(one, range(people)))
    for n, (program, mine) in enumerate(zip(programs, got, strict=True)):
        results = program.ask("history").data[0]["results"]
        assert [(r["prompt"], r["recipe"]["seed"]) for r in results] == [(_prompt(n), n)] * (mine is not None)
    return got


def served(got: Sequence[np.ndarray | None], wanted: Sequence[np.ndarray]) -> int:
    """How many got a picture, each of them their own."""
    given = [(mine, right) for mine, right in zip(got, wanted, strict=True) if mine is not None]
    assert all(np.array_equal(mine, right) for mine, right in given)
    return len(given)


def _prompt(n: int) -> str:
    return PROMPTS[n % len(PROMPTS)]
