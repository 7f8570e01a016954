"""Bytes by arithmetic beside those of features that were recorded."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNet2DConditionModel

from fisedit.features.cache import StepFeatures
from fisedit.features.codec import CACHE_DTYPES, FeatureEncoding, tensors_of
from fisedit.features.record_size import RecordSize
from fisedit.features.sites import unet_sites
from fisedit.models.families.family import SD1
from fisedit.sampling.engine import Engine
from fisedit.sparse.executor import mask_queries
from tests.support.edits import config_of, record
from tests.support.graph_steps import Case
from tests.support.grids import grids

pytestmark = pytest.mark.usefixtures("no_grad")

SD15 = (4096, 1024, 256, 64)
"""Positions of the levels at 512 x 512."""


def test_a_step_and_an_overlay_take_what_is_counted(pipelines):
    for name, branches in (("sd15", 2), ("sd2", 2), ("shallow", 1)):
        case = Case(pipelines[name].unet, [grids(13, 17)["blobs"]], branches=branches)
        sites, plan = case.executor.sites, case.plans[0]
        sizes, rows = ([getattr(level, key) for level in plan.levels] for key in ("size", "rows"))
        for encoding in (*CACHE_DTYPES.values(), FeatureEncoding(8, 20_000)):
            features = StepFeatures(dict(case.maps.maps), case.maps.statistics, case.maps.joined)
            features.encode(encoding)
            size = RecordSize(sites, tuple(sizes), branches, 4, encoding)
            assert size.step == features.own_bytes
            _, overlay = case.alone(0)
            overlay.encode(encoding)
            kept = sum(t.numel() * t.itemsize for found in overlay.maps.values() for t in tensors_of(found))
            missing = set(case.maps.statistics) - set(overlay.statistics)  # of small maps none are kept
            counted = size.overlay(rows) - sum(case.maps.statistics[key].nbytes for key in missing)
            assert counted == kept + sum(t.nbytes for t in overlay.statistics.values())


def test_of_stable_diffusion_a_step_takes_at_most_95_megabytes_and_60_in_4_bits():
    """With the queries of masks on two fifths of the steps, in a byte or half of one."""
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(SD1.configs / "unet"))
    sites = unet_sites(unet)
    for name, limit in (("int8", 95e6), ("int4", 60e6)):
        size = RecordSize(sites, SD15, 2, 2, CACHE_DTYPES[name])
        assert 0.8 * limit < size.step + 0.4 * size.queries(mask_queries(sites, SD15)) <= limit


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_a_source_takes_what_is_counted(pipelines, name):
    engine, config = Engine(pipelines["demo"], encoding=CACHE_DTYPES[name]), config_of(num_inference_steps=10)
    features = record(engine, config).features
    for start in (0, 7):
        assert engine.recorded_bytes(config, start) == sum(step.own_bytes for step in features[start:])
