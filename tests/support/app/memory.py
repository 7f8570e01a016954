"""One user's hour: what the app's process holds after many pictures and edits of one session.

    python -m tests.support.app.memory --pictures 180

Prints, as JSON, the resident MiB once the model is loaded and after every tenth picture, beside the recorded features.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing

import psutil

from app import handlers
from app.sessions import AppState
from app.validation import SourceSettings
from fisedit.machine.malloc import keep_freed_memory
from tests.support.app.requests import last

ANIMALS, EVERY, EDITS = ("cat", "dog", "fox", "rabbit"), 10, 3


def samples(state: AppState, pictures: int, steps: int) -> Iterator[dict[str, float]]:
    """What is held before, and after every so many pictures; each new picture is edited a few times."""
    session, process = state.session("me"), psutil.Process()
    for number in range(pictures + 1):
        if number % EVERY == 0:
            held = {"rss_mib": process.memory_info().rss / 2**20, "features_mib": session.recorded_bytes / 2**20}
            yield {"pictures": number} | {name: round(value) for name, value in held.items()}
        turn, edit = divmod(number, EDITS + 1)
        prompt = f"a {ANIMALS[(turn + edit) % len(ANIMALS)]} and a cake on a beach"
        settings = SourceSettings(steps=steps, seed=turn)
        last(handlers.edit(state, session, prompt) if edit else handlers.generate(state, session, prompt, settings))


def main() -> None:
    """Print the samples and the bound on features."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=180)
    parser.add_argument("--steps", type=int, default=25)
    asked = parser.parse_args()
    keep_freed_memory()
    with closing(AppState.open()) as state:
        held = list(samples(state, asked.pictures, asked.steps))
        json.dump({"feature_bound_mib": state.feature_bytes >> 20, "samples": held}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
