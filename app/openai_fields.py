"""The fields of OpenAI's image API, and what becomes of each. Knows names and values alone.

Looked up in the types of PyPI's `openai` and in what Open WebUI sends.
"""

from __future__ import annotations

from app.request_fields import IDLE, OBEYED, REFUSED, TOLD, Field, FieldTable

_GIF = "of `output_format` gif, which is refused"

_BOTH = (
    Field("prompt", OBEYED, "`<lora:name:0.8>` applies an offered LoRA"),
    Field("model", OBEYED, "a model of `/v1/models`; told if it is not offered, and the first one paints"),
    Field("n", OBEYED, "1 to 8"),
    Field("seed", OBEYED, "ours: of the first picture; -1 or none draws a new one, which `data` tells"),
    Field("response_format", OBEYED, "b64_json; url is refused"),
    Field("output_format", OBEYED, "png, jpeg or webp; others are refused"),
    Field("output_compression", OBEYED, "0 to 100, the quality of jpeg and webp; 100 for png alone"),
    Field("stream", OBEYED, "an event for each finished picture"),
    Field("partial_images", TOLD, "no events come before a picture is finished", (None, 0, "0", ""), "stream"),
    Field(
        "background",
        REFUSED,
        "pictures are opaque, and an edit keeps its picture's own alpha; send opaque or auto",
        (None, "", "auto", "opaque"),
    ),
    Field(
        "quality",
        TOLD,
        "there is one quality of pictures",
        (None, "", "auto", "standard", "medium"),
    ),
    Field("complexity", TOLD, "nothing is planned", (None, "", "medium")),
    Field("frame_count", IDLE, _GIF),
    Field("frame_duration_ms", IDLE, _GIF),
    Field("svg", REFUSED, "pictures are of pixels; leave it out"),
    Field("moderation", IDLE, "nothing is moderated"),
    Field("user", IDLE, "use is not watched"),
    Field("safety_identifier", IDLE, "use is not watched"),
)

GENERATIONS = FieldTable(
    (
        *_BOTH,
        Field("size", OBEYED, "WIDTHxHEIGHT, up to four times the model's own; auto for that"),
        Field("style", TOLD, "describe the style in the prompt", (None, "", "natural")),
    )
)

EDITS = FieldTable(
    (
        *_BOTH,
        Field("image", OBEYED, "one picture; several are refused"),
        Field("image[]", OBEYED, "as `image`"),
        Field("mask", OBEYED, "clear where the picture may change; without one the changed words say"),
        Field("source_prompt", OBEYED, "ours: what the picture shows"),
        Field("size", OBEYED, "the picture's own, or auto; another is refused"),
        Field("input_fidelity", IDLE, "an edit keeps every pixel outside the mask"),
        Field("markup", REFUSED, "give a mask instead"),
    )
)
