"""gradio's page, whose events always answer, and fail in one line with a code, whichever way they are called.

Knows how gradio runs an event; not which events there are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from inspect import isgeneratorfunction
from typing import Any

import gradio as gr

from app.error_responses import INTERNAL_LINE
from fisedit.errors import FisEditError, InputError


class PageBlocks(gr.Blocks):
    """A `gradio.Blocks`. Errors raised on purpose keep their text and code; that of others is in the log alone."""

    async def preprocess_data(self, *args: Any, **kwargs: Any) -> list[Any]:
        """A call's arguments as components read them. Raises InputError for what they cannot read."""
        try:
            read: list[Any] = await super().preprocess_data(*args, **kwargs)
        except OSError:
            raise
        except Exception as error:  # components raise whatever an odd value leads to
            raise InputError("arguments must be of the kinds that /gradio_api/info lists") from error
        return read

    async def call_function(
        self, block_fn: Any, processed_input: list[Any], iterator: AsyncIterator[Any] | None = None, *others: Any
    ) -> dict[str, Any]:
        """Call an event, or take its next step. One that ends without a step changes nothing: gradio would empty all
        that it may show."""
        called: dict[str, Any] = await super().call_function(block_fn, processed_input, iterator, *others)
        if iterator is None and isgeneratorfunction(block_fn.fn) and not called["is_generating"]:
            called["prediction"] = gr.skip()
        return called

    async def process_api(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run an event, or its next step. Raises gradio.Error alone."""
        try:
            return await super().process_api(*args, **kwargs)
        except FisEditError as error:
            raise gr.Error(f"error[{error.code}]: {error}", print_exception=False) from error
        except Exception as error:  # gradio would send its text, with paths and names of the server's
            raise gr.Error(INTERNAL_LINE) from error
