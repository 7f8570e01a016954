"""OpenAI's image routes, by OpenAI's own client; and served without the page, behind a token."""

from __future__ import annotations

import base64
import io
from contextlib import closing
from threading import Thread

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from app import server
from app.sessions import AppState
from tests.support.app.requests import CAT, DOG, png

TOKEN = "sixteen-letters-or-more"


@pytest.fixture(scope="module")
def url(model):
    """Where the routes are served, without the page."""
    address = server.listen(port=0, token=TOKEN)
    with server.pixel_limit(), closing(AppState.open(model)) as state:
        running = server.make_server(state, address)
        thread = Thread(target=running.run, args=([address.listener],))
        thread.start()
        try:
            yield address.url.partition("?")[0]
        finally:
            running.should_exit = True
            thread.join()


@pytest.fixture
def images(url):
    """The client's images."""
    return openai.OpenAI(base_url=f"{url}v1", api_key=TOKEN, max_retries=0).images


def opened(response) -> list[Image.Image]:
    return [Image.open(io.BytesIO(base64.b64decode(one.b64_json))) for one in response.data]


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"), int)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pictures_of_a_prompt(images, count):
    made = opened(images.generate(prompt=CAT, n=count, size="64x72"))
    assert [image.size for image in made] == [(64, 72)] * count


def test_an_edit_keeps_every_pixel_that_the_mask_does_not_clear(images):
    (source,) = opened(images.generate(prompt=CAT, size="64x64"))
    clear = Image.new("RGBA", (64, 64), "white")
    clear.paste((0, 0, 0, 0), (0, 0, 32, 64))
    asked = {"image": ("cat.png", png(source)), "mask": ("mask.png", png(clear))}
    (edit,) = opened(images.edit(**asked, prompt=DOG))
    changed = (pixels(edit) != pixels(source)).any(-1)
    assert changed[:, :32].any() and not changed[:, 32:].any()


def test_without_a_mask_the_changed_words_say_where(images):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    (edit,) = opened(images.edit(image=("photo.png", png(photo)), prompt=DOG, extra_body={"source_prompt": CAT}))
    assert edit.size == (64, 64) and (pixels(edit) != pixels(photo)).any()


def test_formats_seeds_and_events(images):
    """And notes on what is not read."""
    first = images.generate(prompt=CAT, size="64x64", output_format="webp", extra_body={"seed": 7, "steps": 3})
    seeded = {"prompt": CAT, "size": "64x64", "extra_body": {"seed": 7}}
    again = images.generate(**seeded, output_format="jpeg", output_compression=30)
    (webp,), (jpeg,) = opened(first), opened(again)
    assert (webp.format, jpeg.format) == ("WEBP", "JPEG") and first.data[0].seed == again.data[0].seed == 7
    assert first.notes == ["steps is not known here and not read, got 3"] and "a JPEG is not exact" in again.notes[0]
    assert (first.output_format, first.size, first.background) == ("webp", "64x64", "opaque")
    (event,) = images.generate(**seeded, stream=True)
    streamed = Image.open(io.BytesIO(base64.b64decode(event.b64_json)))
    assert event.type == "image_generation.completed" and (pixels(streamed) == pixels(webp)).all()
    assert 0 < np.abs(pixels(jpeg) - pixels(webp)).mean() < 20


def test_without_a_mask_the_clear_pixels_of_the_picture_are_filled(images):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).convert("RGBA")
    photo.paste((0, 0, 0, 0), (11, 9, 40, 30))
    (edit,) = opened(images.edit(image=("photo.png", png(photo)), prompt=DOG, extra_body={"source_prompt": CAT}))
    changed = (pixels(edit) != pixels(photo)).any(-1)
    assert edit.getchannel("A").getextrema() == (255, 255)
    assert Image.fromarray(changed).getbbox() == (11, 9, 40, 30)


def test_models_are_listed(url):
    (one,) = openai.OpenAI(base_url=f"{url}v1", api_key=TOKEN, max_retries=0).models.list().data
    assert one.id and one.owned_by == "fisedit"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"size": "1024x1024"}, "size must be at most 4 times the"),
        ({"response_format": "url"}, "response_format must be b64_json, got 'url'"),
        ({"output_format": "gif"}, "output_format must be png, jpeg or webp, got 'gif'"),
        ({"output_compression": 50}, "output_compression must be 0 to 100, of jpeg or webp, got 50 for png"),
        ({"background": "transparent"}, "background is not supported, got 'transparent'"),
        ({"extra_body": {"seed": "x"}}, "seed must be a whole number, got 'x'"),
    ],
)
def test_what_is_not_made(images, asked, message):
    with pytest.raises(openai.BadRequestError, match=message):
        images.generate(prompt=CAT, **asked)


def test_bad_requests_are_one_line(images):
    with pytest.raises(openai.BadRequestError, match="n must be 1 to 8, got 9"):
        images.generate(prompt=CAT, n=9)
    with pytest.raises(openai.BadRequestError, match="size must be such as 512x512"):
        images.generate(prompt=CAT, size="large")
    with pytest.raises(openai.BadRequestError, match="prompt must say something"):
        images.generate(prompt=" ")
    with pytest.raises(openai.BadRequestError, match="mask must be clear where the picture may change"):
        images.edit(
            image=("a.png", png(Image.new("RGB", (64, 64)))), mask=("b.png", png(Image.new("L", (64, 64)))), prompt=CAT
        )


def test_an_edit_is_of_one_picture_and_keeps_its_size(images):
    picture = ("a.png", png(Image.new("RGB", (64, 64), "red")))
    with pytest.raises(openai.BadRequestError, match="image must be one picture, got 2"):
        images.edit(image=[picture, picture], prompt=DOG)
    with pytest.raises(openai.BadRequestError, match="size must be auto or the picture's, 64x64, got '512x512'"):
        images.edit(image=picture, prompt=DOG, size="512x512")


def test_nothing_is_answered_without_the_token_and_nothing_else_is_served(url, images):
    with pytest.raises(openai.AuthenticationError, match="the token is missing or wrong"):
        openai.OpenAI(base_url=f"{url}v1", api_key="another", max_retries=0).images.generate(prompt=CAT)
    for credentials, status in (("anybody", TOKEN), 200), (("anybody", "another"), 401), (None, 401):
        for route in ("samplers", "loras", "schedulers", "upscalers", "memory"):
            assert httpx.get(f"{url}sdapi/v1/{route}", auth=credentials).status_code == status
    assert httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 404
