"""Short ways to a picture, an edit and a file, for tests of the app without a browser."""

from __future__ import annotations

import base64
import io
import threading
from types import SimpleNamespace

from app import handlers
from app.components import ALL_PIECES
from app.validation import SourceSettings

CAT, DOG, FOX = "a cat and a cake on a beach", "a dog and a cake on a beach", "a fox and a cake on a beach"
QUICK = SourceSettings(steps=4, seed=7, width=128, height=128)

ME = SimpleNamespace(session_hash="me")
"""A request of a page."""

NOTHING_READ = (None, 1.0, None, 1.0, False, False, *[0] * 11)
"""What the page sends for adapters where they read nothing: pictures, scales, edges, and a drive that is off."""

REGION = ("", [], ALL_PIECES[1], 0, False, 0, 1, "balanced")
"""Values of a region: nothing painted, no words, all pieces."""


def last(steps):
    return list(steps)[-1].result


def made(state, session, prompt=CAT, settings=QUICK):
    return last(handlers.generate(state, session, prompt, settings))


def png(image, **options):
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def as_url(image):
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def idle(session):
    for _ in range(1000):
        if session.idle:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the work goes on")
