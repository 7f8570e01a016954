"""An event that has nothing to show leaves the page as it is."""

from __future__ import annotations

import asyncio

import gradio as gr
import pytest

from app import main
from app.page_blocks import PageBlocks


def steps_of(blocks, event, inputs=()):
    """What a page gets of an event, step by step."""
    given, request = [], gr.Request(session_hash="me")
    while not given or given[-1]["is_generating"]:
        iterator = given[-1]["iterator"] if given else None
        given.append(asyncio.run(blocks.process_api(event, list(inputs), iterator=iterator, request=request)))
    return [step["data"] for step in given]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("count", [0, 1])
def test_one_that_ends_without_a_step_changes_nothing(outputs, count):
    def event():
        for _ in range(count):
            yield {shown[0]: "new"}

    with PageBlocks() as blocks:
        shown = [gr.Textbox("old") for _ in range(outputs)]
        gr.Button().click(event, None, shown)
    first, *_ = steps_of(blocks, blocks.fns[0])
    unchanged = {"__type__": "update"}
    assert first == ["new" if count else unchanged, *[unchanged] * (outputs - 1)]


@pytest.mark.parametrize("name", ["on_live", "on_follow"])
def test_the_page_stays_where_there_is_nothing_to_draw_or_to_follow(state, name):
    blocks = main.build(state)
    event = next(event for event in blocks.fns.values() if event.name == name)
    inputs = [component.value for component in event.inputs]
    (step,) = steps_of(blocks, event, inputs)
    assert len(step) == len(event.outputs)
    assert all(update["__type__"] == "update" and not {"value", "picture"} & update.keys() for update in step)
