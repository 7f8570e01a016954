"""Where the app listens, whom it lets in, and what its process says and leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from subprocess import PIPE

import httpx
import pytest
from PIL import Image

from app import server
from app.server import MAX_WAITING
from fisedit.errors import InputError
from fisedit.storage.canvas import MAX_PIXELS
from tests.support.app import crowd
from tests.support.app.loops import in_a_thread

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_others_need_a_token(host):
    with pytest.raises(InputError, match="give --token"):
        server.listen(host, 0)


@pytest.mark.parametrize("token", ["short", "0123456789abcde", "0123456789abcdef;", "0123456789 abcdef", "é" * 16])
def test_tokens_that_are_none(token):
    with pytest.raises(InputError, match="16 letters"):
        server.listen(token=token, port=0)


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 cannot be had .*in use.* give another --port"):
            server.listen(port=port)


@pytest.mark.parametrize("host", ["no such host", "256.1.1.1", "a" * 300, "\0"])
def test_no_host(host):
    with pytest.raises(InputError, match="host must be"):
        server.listen(host, 0)


def test_names_that_are_let_in():
    here = server.listen("127.0.0.1", 0, allowed_hosts=["Studio.local"])
    everywhere = server.listen("0.0.0.0", 0, TOKEN)
    try:
        assert here.hosts == {"127.0.0.1", "localhost", "::1", "studio.local"} and not here.token
        assert socket.gethostname().lower() in everywhere.hosts and "*" not in everywhere.hosts
        assert here.url == f"http://127.0.0.1:{here.listener.getsockname()[1]}/"
        assert everywhere.url.endswith(f"/?token={TOKEN}")
    finally:
        here.listener.close()
        everywhere.listener.close()


def test_small_answers_go_out_at_once():
    """asyncio switches Nagle's algorithm off where a socket names its protocol; else every answer waits 40 ms."""

    async def delays() -> int:
        address, accepted = server.listen(port=0), asyncio.Queue()
        running = await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), sock=address.listener)
        async with running:
            _, caller = await asyncio.open_connection(*address.listener.getsockname())
            writer = await accepted.get()
            caller.close()
            writer.close()
            return writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    assert in_a_thread(delays()) == 1


@pytest.mark.slow
def test_refusals_are_one_line_before_anything_is_loaded(process):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        process("app", "--port", other.getsockname()[1]).refused("input", "cannot be had", "--port")
    process("app", "--host", "0.0.0.0").refused("input", "give --token")
    process("app", "--port", "0", "--model", "nowhere").refused("model", "nowhere")
    process("app", "--port", "0", "--lora", "nowhere.safetensors").refused("adapter", "nowhere.safetensors")


def test_a_whole_life(tmp_path):
    """Started as a user starts it; what it says, who is let in, and what it leaves behind."""
    command = [sys.executable, "-m", "fisedit", "app", "--port", "0", "--sessions", "kept"]
    surroundings = os.environ | {"FISEDIT_TOKEN": TOKEN, "TMPDIR": str(tmp_path)}
    running = subprocess.Popen(command, cwd=tmp_path, env=surroundings, stdout=PIPE, stderr=PIPE, text=True)
    try:
        assert running.stdout is not None
        url, query = re.search(r"(http://127\.0\.0\.1:\d+/)(\?token=\S+) ", running.stdout.readline()).groups()
        assert httpx.get(url, timeout=60).status_code == 401
        with httpx.Client(base_url=url, follow_redirects=True, timeout=60) as browser:
            page = browser.get(f"/{query}")
            assert page.status_code == 200 and TOKEN not in page.text and not re.search("https?://(?!127)", shown(page))
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{url}gradio_api/info", headers=allowed).json()["named_endpoints"].keys() >= ENDPOINTS
        assert httpx.get(f"{url}gradio_api/openapi.json", headers=allowed).json()["paths"]
    finally:
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (0, "", "")
    assert not any(left.name.startswith("fisedit") for left in tmp_path.iterdir())


def test_a_terminated_process_leaves_no_folder(tmp_path):
    code = """import os, signal, time
from app.server import environment
with environment(offline=True) as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=PIPE, text=True, check=False
    )
    assert run.returncode == 128 + signal.SIGTERM and run.stdout.startswith(str(tmp_path))
    assert not any(tmp_path.iterdir())


ENDPOINTS = {"/generate", "/open", "/edit", "/erase", "/extend", "/preview", "/history"}


def shown(page: httpx.Response) -> str:
    """What a page makes a browser fetch."""
    return " ".join(re.findall(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?([^"' >]+)""", page.text))


PEOPLE = 30


@pytest.mark.slow
def test_everybody_gets_their_own_or_is_told(site):
    wanted = crowd.expected(site.state.pool.first.loaded.editor, PEOPLE)
    got = crowd.ask(site.url, PEOPLE)
    assert crowd.served(got, wanted) >= MAX_WAITING


class TestSurroundings:
    @pytest.fixture(autouse=True)
    def _own(self, monkeypatch):
        monkeypatch.setattr(os, "environ", os.environ.copy())

    def test_without_gradio(self, monkeypatch):
        monkeypatch.setattr(server, "find_spec", lambda _: None)
        with pytest.raises(InputError, match="needs gradio, which is not installed"), server.environment(offline=True):
            pass

    @pytest.mark.parametrize("offline", [False, True])
    def test_the_hub_is_switched_off_where_all_is_here(self, monkeypatch, offline):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        most = Image.MAX_IMAGE_PIXELS
        with server.environment(offline=offline) as uploads:
            assert uploads.is_dir() and os.environ["GRADIO_TEMP_DIR"] == str(uploads)
            assert ("HF_HUB_OFFLINE" in os.environ) == offline and Image.MAX_IMAGE_PIXELS == MAX_PIXELS // 2
        assert not uploads.exists() and most == Image.MAX_IMAGE_PIXELS
