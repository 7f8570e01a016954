"""What edits keep beside their source, and that chains of edits over encoded rows stay near those over rows as they
were."""

from __future__ import annotations

import numpy as np
import pytest

from fisedit import Editor
from fisedit.bench.metrics import psnr
from fisedit.features.cache import FeatureDelta, FeatureOverlay
from fisedit.values import Quality
from tests.support.edits import BIRD, CAT, DOG

STEPS = 16
QUARTER = np.pad(np.ones((16, 16), bool), 8)
PLACES = (QUARTER, np.roll(QUARTER, -6, 0), np.roll(QUARTER, 8, 1))


def chain(quality):
    """A source in 8 bits, and three edits over one another in a quarter of the picture."""
    editor = Editor.from_pretrained("demo", cache_dtype="int8")
    results = [editor.generate(CAT, seed=0, num_inference_steps=STEPS)]
    for prompt, grid in zip((DOG, BIRD, DOG), PLACES, strict=True):
        results.append(editor.edit(prompt, mask=grid, quality=quality))
    assert not any(result.stats.fallback for result in results)
    return results


@pytest.mark.parametrize(("quality", "most"), [(Quality.FAST, 0.38), (Quality.CLOSE, 0.51)])
def test_a_chain_of_edits_keeps_parts_of_its_source_and_stays_near_the_one_over_rows_as_they_were(
    monkeypatch, quality, most
):
    """The first edit is the same to the byte, and later ones have 40 dB or more. At full steps fast edits keep up to 22
    of 32 cells each way; close ones keep changes of the whole map at a fifth of the steps."""
    encoded = chain(quality)
    source, *kept = (result.stats.recorded_bytes for result in encoded)
    assert all(0.2 * source < each <= most * source for each in kept)
    for kind in (FeatureOverlay, FeatureDelta):
        monkeypatch.setattr(kind, "encode", lambda *_: None)
    raw = chain(quality)
    assert encoded[1].image.tobytes() == raw[1].image.tobytes()
    for mine, theirs in zip(encoded[1:], raw[1:], strict=True):
        assert mine.stats.recorded_bytes < 0.55 * theirs.stats.recorded_bytes
        assert psnr(mine.image, theirs.image, np.ones(mine.image.size[::-1], bool)) >= 40
