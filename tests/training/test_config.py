"""Settings of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.config import ConfigError, load_config
from training.train import HERE


@pytest.mark.parametrize("path", sorted(HERE.glob("*.toml")), ids=lambda path: path.name)
def test_the_settings_of_a_run_are_readable(path: Path) -> None:
    config = load_config(path)
    assert min(config.closeups.plan.batch, config.denoiser.plan.batch) > 0


@pytest.mark.parametrize("text", ["[scenes]\nsides = 128\n", "[denoiser.plan]\nbatch = 1\n", "seed = ="])
def test_a_config_that_lacks_or_misspells_a_setting_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "typo.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"has no setting 'sides'|lacks a setting|must be a readable TOML file"):
        load_config(tmp_path / "typo.toml")


def test_a_config_names_the_pipeline_to_start_from(tmp_path: Path) -> None:
    plan = "batch = 1\nseconds = 1\nsteps = 1\nlearning_rate = 1e-3\n"
    stages = "".join(f"[{name}.plan]\n{plan}" for name in ("autoencoder", "decoder", "closeups", "denoiser"))
    (tmp_path / "plain.toml").write_text(stages)
    (tmp_path / "started.toml").write_text(f'start = "runs/first"\n{stages}[scenes]\nside = 128\n')
    assert load_config(tmp_path / "plain.toml").start == ""
    started = load_config(tmp_path / "started.toml")
    assert (started.start, started.scenes.side, started.closeups.plan.batch) == ("runs/first", 128, 1)
