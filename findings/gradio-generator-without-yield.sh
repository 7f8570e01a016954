#!/usr/bin/env bash
# gradio 6.31.0: a generator handler that ends before its first yield empties every output of its event.
# Guess: a handler that yields nothing changes nothing, as one that yields `gr.skip()` does.
# Seen: the event completes with null for each output, which a page shows as emptied fields. One that yields `gr.skip()`
# once completes with "no change". So a handler that may have nothing to say must still answer.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check gradio==6.31.0
GRADIO_ANALYTICS_ENABLED=False "$trial/env/bin/python" - <<'PYTHON'
import gradio
from gradio_client import Client


def silent(text):
    if text:
        return
    yield text


def skips(text):
    yield gradio.skip()


with gradio.Blocks() as page:
    given, kept = gradio.Textbox(), gradio.Textbox("kept")
    for handler in (silent, skips):
        gradio.Button().click(handler, given, kept, api_name=handler.__name__)

_, address, _ = page.launch(prevent_thread_lock=True, quiet=True)
client = Client(address, verbose=False)
seen = {name: client.predict("x", api_name=f"/{name}") for name in ("silent", "skips")}
print(f"gradio {gradio.__version__}: {seen}")
assert seen == {"silent": None, "skips": {"__type__": "update"}}, "this has changed"
PYTHON
