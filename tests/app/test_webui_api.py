"""Automatic1111's routes, by a client that speaks to web UIs, and by hand where no client would."""

from __future__ import annotations

import base64
from io import BytesIO
from threading import Thread
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import webuiapi
from PIL import Image

from app import webui_lists
from fisedit.metadata import image_metadata, provenance
from fisedit.values import SchedulerName
from tests.support.app.requests import CAT, DOG, FOX, png

SMALL = {"width": 64, "height": 64, "steps": 3, "cfg_scale": 4.0}


@pytest.fixture
def client(site):
    """A client of the site, as its users make one."""
    where = urlsplit(site.url)
    return webuiapi.WebUIApi(host=where.hostname, port=where.port, sampler="DDIM", steps=3)


def left_half() -> Image.Image:
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 32, 64))
    return mask


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"), int)


def test_pictures_of_a_prompt(client):
    made = client.txt2img(prompt=CAT, seed=7, batch_size=2, sampler_name="DPM++ 2M", scheduler="Karras", **SMALL)
    assert [image.size for image in made.images] == [(64, 64)] * 2 and made.info["all_seeds"] == [7, 8]
    origin = provenance.parse_origin(image_metadata.read_metadata(made.images[1]))
    assert (origin.config.prompt, origin.config.seed) == (CAT, 8)
    assert origin.config.scheduler is SchedulerName.DPM_SOLVER_KARRAS
    again = client.txt2img(prompt=CAT, seed=7, sampler_name="DPM++ 2M Karras", **SMALL)
    assert (pixels(again.image) == pixels(made.images[0])).all()


def test_a_mask_makes_an_edit_that_keeps_every_other_pixel(client, site):
    source = client.txt2img(prompt=CAT, seed=7, **SMALL).image
    sessions = len(site.state)
    edit = client.img2img(images=[source], prompt=DOG, mask_image=left_half(), denoising_strength=1.0, **SMALL).image
    changed = (pixels(edit) != pixels(source)).any(-1)
    assert changed[:, :32].any() and not changed[:, 32:].any()
    other = client.img2img(
        images=[source], prompt=DOG, mask_image=left_half(), inpainting_mask_invert=1, denoising_strength=1.0, **SMALL
    ).image
    assert not (pixels(other) != pixels(source)).any(-1)[:, :32].any()
    assert len(site.state) == sessions, "in the session that made the picture"


def test_seeds_are_noise_inside_the_mask(client):
    source = client.txt2img(prompt=CAT, seed=7, **SMALL).image
    asked = {"images": [source], "mask_image": left_half(), "batch_size": 2, **SMALL}
    for prompt, seed, strength in ((DOG, -1, 1.0), (CAT, -1, 0.75), (DOG, 5, 0.75)):
        images = client.img2img(prompt=prompt, seed=seed, denoising_strength=strength, **asked).images
        changed = [(pixels(image) != pixels(source)).any(-1) for image in images]
        assert all(one[:, :32].any() and not one[:, 32:].any() for one in changed)
        assert (pixels(images[0]) != pixels(images[1])).any()
    again = client.img2img(prompt=DOG, seed=5, denoising_strength=0.75, **asked).images
    assert all((pixels(one) == pixels(other)).all() for one, other in zip(images, again, strict=True))


def test_an_answer_says_what_was_used(client):
    source = client.txt2img(prompt=CAT, seed=7, **SMALL).image
    asked = {**SMALL, "steps": 20, "cfg_scale": 12.0}
    told = client.img2img(images=[source], prompt=DOG, mask_image=left_half(), denoising_strength=1.0, **asked).info
    assert (told["seed"], told["steps"], told["cfg_scale"], told["sampler_name"]) == (7, 3, 4.0, "DDIM")


def test_what_an_edit_has_from_its_picture_is_told(client):
    source = client.txt2img(prompt=CAT, seed=7, **SMALL)
    assert source.info["notes"] == [] and client.txt2img(prompt=CAT, seed=None, **SMALL).info["seed"] >= 0
    asked = {**SMALL, "steps": 20, "width": 512, "sampler_name": "Euler a", "negative_prompt": "snow"}
    edit = {"images": [source.image], "prompt": DOG, "mask_image": left_half()}
    notes = client.img2img(**edit, mask_blur=9, **asked).info["notes"]
    told = ["steps is 3, not 20", "negative_prompt is '', not 'snow'", "width is 64, not 512"]
    assert all(any(note.startswith(each) for note in notes) for each in told), notes
    assert any("sampler_name is 'DDIM', not 'Euler a'" in note for note in notes)
    assert "mask_blur is not read, got 9: an edit keeps every pixel outside the mask" in notes
    sent = {"init_images": [base64.b64encode(png(source.image)).decode()], "prompt": DOG, "source_prompt": FOX}
    assert "source_prompt is not read, got" in httpx.post(f"{client.baseurl}/img2img", json=sent).json()["info"]


def test_numbers_that_web_uis_read_otherwise_are_told(client):
    for asked, notes in (
        ({"cfg_scale": 0.5}, ["guidance_scale 0.5 is no guidance"]),
        ({"cfg_scale": 0}, ["cfg_scale 0 is no guidance"]),
        ({"override_settings": {"CLIP_stop_at_last_layers": 2}}, []),  # of both prompts, as there
        ({"prompt": "a (cat:12)"}, ["the prompt has (cat:12)"]),
    ):
        made = client.txt2img(**{"prompt": CAT, "seed": 7, **SMALL, **asked})
        assert [note[: len(told)] for note, told in zip(made.info["notes"], notes, strict=True)] == notes


def test_a_schedule_that_is_not_chosen_is_the_samplers_own(client):
    asked = {"prompt": CAT, "seed": 7, "sampler_name": "DPM++ 2M", **SMALL}
    found = [client.txt2img(scheduler=noise, **asked) for noise in (None, "Automatic", "Karras", "Uniform")]
    assert [each.info["sampler_name"] for each in found] == ["DPM++ 2M Karras"] * 3 + ["DPM++ 2M"]
    assert (pixels(found[0].image) == pixels(found[2].image)).all()


def test_without_a_mask_the_whole_picture_is_painted_as_far_as_the_strength_goes(client):
    source = client.txt2img(prompt=CAT, seed=7, **SMALL).image
    near, far = (
        client.img2img(images=[source], prompt=DOG, denoising_strength=share, **SMALL).image for share in (0.4, 1.0)
    )
    gaps = [np.abs(pixels(image) - pixels(source)).mean() for image in (near, far)]
    assert 0 < gaps[0] < gaps[1]


def test_a_picture_from_elsewhere_is_opened(client):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    edit = client.img2img(images=[photo], prompt=DOG, mask_image=left_half(), **SMALL).image
    assert (pixels(edit) == pixels(photo))[:, 32:].all()


def test_a_mask_is_kept_to_the_pixel_as_web_uis_read_it(site):
    """Strokes of any colour on a clear ground mark; a photograph that its EXIF turns is turned first."""
    exif, mask = Image.Exif(), Image.new("RGBA", (64, 48))
    exif[0x0112] = 6
    stored = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 48, 3), np.uint8))
    mask.paste((0, 0, 0, 255), (5, 3, 39, 30))
    asked = {"prompt": DOG, "denoising_strength": 1.0, "steps": 3, "init_images": [encoded(stored, exif=exif)]}
    answer = httpx.post(f"{site.url}sdapi/v1/img2img", json=asked | {"mask": encoded(mask)}, timeout=60).json()
    made = Image.open(BytesIO(base64.b64decode(answer["images"][0])))
    changed = (pixels(made) != pixels(stored.transpose(Image.Transpose.ROTATE_270))).any(-1)
    assert Image.fromarray(changed).getbbox() == (5, 3, 39, 30)
    refused = httpx.post(f"{site.url}sdapi/v1/img2img", json=asked | {"mask": encoded(Image.new("L", (64, 48)))})
    assert refused.status_code == 400 and "got nothing marked" in refused.json()["detail"]


def encoded(image: Image.Image, **options: object) -> str:
    file = BytesIO()
    image.save(file, "PNG", **options)
    return base64.b64encode(file.getvalue()).decode()


def test_what_is_offered(client):
    names = [sampler["name"] for sampler in client.get_samplers()]
    assert names == [name.label for name in SchedulerName]
    (model,) = client.util_get_model_names()
    client.util_set_model(model)
    assert client.util_get_current_model() == model == client.get_sd_models()[0]["title"]
    assert client.get_progress()["progress"] == 0


def test_a_run_tells_how_far_it_is_and_is_interrupted(client):
    failed: list[Exception] = []

    def make() -> None:
        try:
            client.txt2img(prompt=CAT, seed=7, **{**SMALL, "steps": 150})
        except RuntimeError as error:
            failed.append(error)

    run = Thread(target=make)
    run.start()
    while not (now := client.get_progress())["progress"] and run.is_alive():
        pass
    assert now["state"]["sampling_steps"] == 150 and 0 < now["progress"] < 1
    assert Image.open(BytesIO(base64.b64decode(now["current_image"]))).size == (8, 8)
    client.interrupt()
    run.join(60)
    assert "error[cancelled]" in str(failed[0])


@pytest.mark.parametrize(
    ("route", "asked", "line"),
    [
        ("txt2img", {"prompt": ""}, "error[prompt]: prompt must say something"),
        ("txt2img", {"prompt": CAT, "steps": 0}, "error[input]: steps must be"),
        ("txt2img", {"prompt": CAT, "batch_size": 9}, "error[input]: batch_size times n_iter must be 1 to 8"),
        (
            "txt2img",
            {"prompt": CAT, "batch_size": "a", "n_iter": 10**10},
            "error[input]: batch_size times n_iter must be",
        ),
        ("txt2img", {"prompt": CAT, "n_iter": None}, "error[input]: batch_size times n_iter must be 1 to 8"),
        ("txt2img", {"prompt": CAT, "override_settings": ["a"]}, "error[input]: override_settings must be an object"),
        ("txt2img", {"prompt": CAT, "sampler_name": "Magic"}, "error[input]: scheduler must be one of"),
        (
            "txt2img",
            {"prompt": CAT, "seed": True},
            "error[input]: seed must be a whole number in [0, 9223372036854775807]",
        ),
        (
            "txt2img",
            {"prompt": CAT, "seed": 2**63 - 1, "batch_size": 2, **SMALL},
            "error[input]: seed must be a whole number in [0, 9223372036854775807], got 9223372036854775808",
        ),
        ("txt2img", {"prompt": CAT, "clip_skip": True}, "error[input]: clip_skip must be a whole number in [0, 11]"),
        ("txt2img", {"prompt": ["cat"]}, "error[input]: prompt must be text, got list"),
        ("txt2img", ["cat"], "error[input]:"),
        ("img2img", {"prompt": CAT}, "error[input]: init_images must hold a picture"),
        ("img2img", {"prompt": CAT, "init_images": ["AAAA"]}, "error[input]:"),
        ("img2img", {"prompt": CAT, "init_images": ["AAAA", "AAAA"]}, "error[input]: init_images must hold a picture"),
        ("txt2img", {"prompt": CAT, "enable_hr": True}, "error[input]: enable_hr is not supported, got True"),
        ("txt2img", {"prompt": "a <lora:nothere:1>"}, "error[input]: lora must be one of"),
        ("txt2img", {"prompt": "a <lora:nothere:big>"}, "error[prompt]: a LoRA's tag must have a number"),
        ("txt2img", {"prompt": "a [cat|dog]"}, "error[prompt]: prompt has [cat|dog], which changes with every step"),
        ("txt2img", {"prompt": CAT, "sampler_name": "Euler", "scheduler": "Beta"}, "error[input]: scheduler must be"),
        ("options", {"sd_model_checkpoint": "other"}, "error[input]:"),
        ("options", {"eta_ddim": 0.5}, "error[input]: options.eta_ddim is not known here"),
        ("png-info", {}, "error[input]: image must be a picture in base64, got NoneType"),
        ("png-info", {"image": "AAAA"}, "error[input]: picture must be a"),
    ],
)
def test_bad_requests_are_one_line(site, route, asked, line):
    answer = httpx.post(f"{site.url}sdapi/v1/{route}", json=asked)
    assert answer.status_code == 400 and answer.json()["detail"].startswith(line), answer.text


def test_every_list_that_clients_ask_for_is_answered_also_where_it_is_empty(client, site):
    for name, answer in webui_lists.LISTS.items():
        assert httpx.get(f"{site.url}sdapi/v1/{name}").json() == answer
    for name in webui_lists.REFRESHES:
        answered = httpx.post(f"{site.url}sdapi/v1/{name}")
        assert answered.status_code == 200 and answered.json() is None
    schedulers = client.get_schedulers()
    assert [each["name"] for each in schedulers] == ["automatic", "uniform", "karras", "exponential"]
    assert schedulers[0].keys() == {"name", "label", "aliases", "default_rho", "need_inner_model"}
    assert [each["name"] for each in client.get_loras()] == list(site.state.pool.loras.labels)
    assert client.get_memory()["ram"]["total"] > 0 and client.refresh_checkpoints() is None


def test_a_picture_is_asked_how_it_was_made(client):
    made = client.txt2img(prompt=CAT, seed=7, **SMALL).image
    told = client.png_info(made).info
    assert told.startswith(f"{CAT}\nSteps: 3, Sampler: DDIM, CFG scale: 4, Seed: 7, Size: 64x64")
    asked = {"image": encoded(Image.new("RGB", (8, 8)))}
    answer = httpx.post(f"{client.baseurl}/png-info", json=asked).json()
    assert answer == {"info": "", "items": {}, "parameters": {}}


def test_a_model_that_is_taken_from_memory_comes_back_with_the_next_request(client, site):
    source, pool = client.txt2img(prompt=CAT, seed=7, **SMALL).image, site.state.pool
    assert httpx.post(f"{client.baseurl}/unload-checkpoint").json() == {} and pool.first.loaded is None
    edit = client.img2img(images=[source], prompt=DOG, mask_image=left_half(), denoising_strength=1.0, **SMALL).image
    assert pool.first.loaded is not None and not (pixels(edit) != pixels(source))[:, 32:].any()
    httpx.post(f"{client.baseurl}/unload-checkpoint")
    assert httpx.post(f"{client.baseurl}/reload-checkpoint", timeout=60).json() == {}
    assert pool.first.loaded is not None


def test_other_routes_are_not_there(site):
    for route in ("sdapi/v1/server-kill", "sdapi/v1/interrogate", "sdapi/v1/", "sdapi/v1", "sdapi/v1/loras/a"):
        assert httpx.get(f"{site.url}{route}").status_code == 404
    assert httpx.post(f"{site.url}sdapi/v1/txt2img", content=iter([b"{}"])).status_code == 411
