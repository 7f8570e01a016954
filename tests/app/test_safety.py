"""What others may try with a server that runs: the App cases of the reliability plan, over real HTTP."""

from __future__ import annotations

import json
import math
import uuid

import httpx
import pytest

from tests.support.app.program import JSON, Program, settle
from tests.support.app.uploads import png, upload
from tests.support.folders import claims

CAT, DOG = "a cat and a cake on a beach", "a dog and a cake on a beach"
SMALL = (0, 2, 4.0, 64, 64)
"""Seed, steps, guidance, width, height of a picture that takes no time."""

LONG = 60

ELSEWHERE = """/etc/passwd ../../etc/passwd file:///etc/passwd http://127.0.0.1:1/a.png http://169.254.169.254/latest
http://[::1]/a.png https://example.com/a.png"""


class TestArguments:
    @pytest.mark.slow
    def test_a_prompt_of_100000_letters(self, program, steps):
        assert "at most 2000 letters, got 100000" in program.refused("prompt", "generate", "a" * 100_000)
        assert "at most 2000 letters" in program.refused("prompt", "generate", CAT, *SMALL, "ddim", "a" * 100_000)
        assert not steps

    @pytest.mark.parametrize(
        "prompt",
        ["", "\0\0", pytest.param("   ", marks=pytest.mark.slow), pytest.param("\x1b\n", marks=pytest.mark.slow)],
    )
    def test_prompts_that_say_nothing(self, program, steps, prompt):
        program.refused("prompt", "generate", prompt)
        assert not steps

    @pytest.mark.parametrize(
        ("place", "values"),
        [
            (1, [-1, 2**63, 1.5, True, math.nan, "7"]),
            (2, [0, -1, 151, 10**12, 2.5, math.inf, None]),
            (3, [-1, 31, 1e308, math.nan, "high"]),
            (4, [0, 8, 65, 1544, 10**9, -64]),
            (5, [0, 8, 65, 1544, 10**9, -64]),
            (6, ["", "ddim; rm", "x" * 10_000, 7, None]),
            (8, ["other", "../demo", "/etc/passwd", "owner/name", "x" * 10_000, 7, None, ["demo"]]),
            (9, [{"ink": 1.0}, {"/etc/passwd": 1.0}, {str(n): 1.0 for n in range(9)}, {"": 1}, ["ink"], "ink", None]),
            (10, ["AAAA", "/etc/passwd", "http://127.0.0.1:1/a.png", 7, None, "a" * (3 << 20 | 4)]),
        ],
        ids=["seed", "steps", "guidance", "width", "height", "scheduler", "model", "loras", "reference"],
    )
    def test_numbers_out_of_range(self, program, steps, place, values):
        good = [CAT, *SMALL, "ddim", "", "", {}, "", 1.0]
        for value in values:
            program.refused("input", "generate", *good[:place], value, *good[place + 1 :])
        assert not steps

    def test_wishes_out_of_range(self, program, steps):
        program.ask("generate", CAT, *SMALL)
        steps.clear()
        good = [DOG, "", "", [], -1, 0]
        bad = {3: ["cat", [7], ["a"] * 17, ["a" * 3000]], 4: [-2, 10**9, "a"], 5: [17, -17, 0.5, math.nan]}
        for place, values in bad.items():
            for value in values:
                for name in ("edit", "preview"):
                    program.refused("input", name, *good[:place], value, *good[place + 1 :])
        for mask in ("no base64", "AAAA", "a" * 2**21):
            assert program.ask("edit", DOG, mask).kind == program.ask("preview", DOG, "", mask).kind == "error"
        assert not steps

    def test_nothing_to_edit_yet(self, program):
        program.refused("session", "edit", DOG)
        program.refused("session", "history", "7")

    def test_control_signs_never_arrive(self, program):
        made = program.ask("generate", "a cat\x1b[31m and\x07 <b>a cake</b>\x9b2J", *SMALL).data[0]
        assert made["prompt"].isprintable() and "<b>a cake</b>" in made["prompt"]


class TestPlaces:
    @pytest.mark.parametrize("path", ELSEWHERE.split())
    def test_no_path_and_no_address_is_read(self, site, path):
        for file in ({"path": path}, {"path": path, "url": path}, {"url": path}):
            told = json.dumps(
                {"data": [file | {"meta": {"_type": "gradio.FileData"}}, CAT, 0, 2, 4], "session_hash": "a"}
            )
            for route in ("call/open", "run/open", "call/v2/open", "queue/join"):
                answer = httpx.post(f"{site.url}gradio_api/{route}", content=told, headers=JSON)
                assert (answer.status_code, "root:" in answer.text) == (403, False)
        for way in ("file=", "proxy=", "file/", "static/", "custom_component/"):
            answer = httpx.get(f"{site.url}gradio_api/{way}{path}")
            assert answer.status_code in (403, 404) and "root:" not in answer.text

    def test_the_servers_own_files(self, site):
        for path in (__file__, site.uploads, site.state.folder):
            assert httpx.get(f"{site.url}gradio_api/file={path}").status_code == 403

    def test_gradio_would_refuse_them_too(self, site):
        """The request guard is not the only one."""
        from app import main, server

        page = main.build(site.state)
        server.application(site.state, server.listen(port=0), server.ServedPage(page, {}, site.uploads))
        assert page.has_launched and page.allowed_paths == []

    def test_a_forged_host(self, site):
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80"):
            assert httpx.get(site.url, headers={"host": host}).status_code == 400

    def test_a_page_of_another_site(self, site):
        headers = JSON | {"origin": "http://evil.example"}
        answer = httpx.post(f"{site.url}gradio_api/call/generate", content='{"data": ["a cat"]}', headers=headers)
        assert answer.status_code == 403

    def test_uploads_are_looked_at_like_any_file(self, site, program, steps):
        for data in (b"no picture", b"", b"<svg/>", png()[:60], claims(png(), 100_000)):
            assert "picture must" in program.refused("input", "open", upload(site, data), CAT, 0, 2, 4)
        for side in (6_000, 100_000):  # of which Pillow itself refuses the second
            line = program.refused("input", "open", upload(site, claims(png(), side)), CAT, 0, 2, 4)
            assert "at most 32 million pixels" in line
        assert not steps


class TestOthers:
    def test_a_session_is_its_owners(self, site, program):
        mine = program.ask("generate", CAT, *SMALL).data[0]
        other = Program(site.url, uuid.uuid4().hex)
        assert other.ask("history", "", True).data[0] == {"current": None, "results": []}
        other.refused("session", "history", mine["id"])
        other.refused("session", "edit", DOG)
        assert [one["id"] for one in program.ask("history").data[0]["results"]] == [mine["id"]]

    @pytest.mark.parametrize("key", ["", "..", "../..", "/etc", "a" * 32, "0" * 31 + "/", "\0", "A" * 10_000])
    def test_a_key_is_not_guessed(self, site, program, key):
        program.ask("generate", CAT, *SMALL)
        assert not len(site.state.adopt(uuid.uuid4().hex, key).history)


class TestLeaving:
    """Who leaves stops the work, wherever it stands, and finds the session as it was."""

    @pytest.mark.parametrize("stage", ["generate", "edit", "open"])
    def test_while_it_runs(self, site, program, steps, stage):
        if stage == "edit":
            program.ask("generate", CAT, 0, LONG, 4.0, 64, 64)
        told = {"generate": [CAT, 0, LONG, 4.0], "edit": [DOG], "open": [upload(site, png()), CAT, 0, LONG, 4.0]}[stage]
        steps.clear()
        events = program.events(stage, program.send(stage, *told))
        while next(events).data[0]["step"] < 2:
            pass
        events.close()
        settle(site)
        assert "stop" in steps and steps[steps.index("stop") :].count("step") <= 1
        assert steps.count("step") < LONG
        assert [one["prompt"] for one in program.ask("history").data[0]["results"]] == [CAT] * (stage == "edit")

    def test_while_it_waits(self, site, program, steps):
        ahead = [Program(site.url, uuid.uuid4().hex) for _ in range(2)]
        runs = [one.events("generate", one.send("generate", CAT, 0, LONG, 4.0)) for one in ahead]
        runs.append(program.events("generate", program.send("generate", DOG, 0, LONG, 4.0)))
        for events in runs:
            next(events)
        for events in reversed(runs):  # who waits leaves first
            events.close()
        settle(site)
        assert steps.count("stop") == 3 and steps.count("step") < LONG
        assert program.ask("history").data[0]["results"] == []
