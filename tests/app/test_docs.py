"""What docs/app.md shows is true: its Python and its curl run. The app answers the routes of docs/guides/clients.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import httpx
import pytest
from PIL import Image

from tests.support.documents import APP_ADDRESS, APP_GUIDE, CLIENTS_GUIDE, blocks


def test_the_python_runs(site, tmp_path):
    (code,) = [block for block in blocks("python", APP_GUIDE) if "gradio_client" in block]
    code = code.replace(APP_ADDRESS, site.url)
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(r"cat -> dog: \d+% of the picture may change", run.stdout)
    assert "'a dog and a cake on a beach'] now at 0" in run.stdout
    assert Image.open(tmp_path / "dog.png").info["parameters"].startswith("a dog and a cake on a beach")


def test_other_clients_run(site, tmp_path):
    """Of web UIs and of OpenAI, one after the other, on one picture."""
    code = "\n".join(block for block in blocks("python", APP_GUIDE) if "webuiapi" in block or "OpenAI" in block)
    port = site.url.rstrip("/").rpartition(":")[2]
    code = code.replace(APP_ADDRESS, site.url).replace("port=7860", f"port={port}").replace("//v1", "/v1")
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert Image.open(tmp_path / "cat.png").size == (256, 256)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_runs(site):
    code = "\n".join(block for block in blocks("bash", APP_GUIDE) if "curl" in block)
    code = code.replace(APP_ADDRESS, site.url.rstrip("/"))
    run = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("event: generating") >= 10 and "event: error" not in run.stdout
    assert run.stdout.count("event: complete") == 2 and '"change": "cat -> dog"' in run.stdout


def test_every_route_that_the_guided_clients_call_is_answered(site):
    routes = re.findall(r"^\| `(GET|POST) /(\S+)` \|", CLIENTS_GUIDE, re.MULTILINE)
    assert ("POST", "v1/images/edits") in routes and ("GET", "sdapi/v1/sd-modules") in routes
    for method, route in routes:
        answer = httpx.request(method, site.url + route, **({"json": {}} if method == "POST" else {}))
        assert answer.status_code in ((200,) if method == "GET" else (200, 400)), (method, route, answer.text)
    assert httpx.get(f"{site.url}system_stats").status_code == 404, "what Krita asks first"
