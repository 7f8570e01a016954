#!/usr/bin/env bash
# diffusers 0.42.1: Karras' sigmas give a scheduler timesteps that occur more than once.
# Guess: every step of a schedule has a timestep of its own, so that a step can be found by it.
# Seen: DPM++ 2M with Karras' sigmas has 49 timesteps in 50 steps, 59 in 60 and 95 in 100: they are rounded to integers.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.23.0
"$trial/env/bin/python" - <<'PYTHON'
import diffusers

scheduler = diffusers.DPMSolverMultistepScheduler(
    beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, use_karras_sigmas=True
)
for steps, expected in ((30, 30), (50, 49), (60, 59), (100, 95)):
    scheduler.set_timesteps(steps)
    different = len(set(scheduler.timesteps.tolist()))
    print(diffusers.__version__, steps, "steps,", different, "timesteps")
    assert different == expected, "this has changed"
PYTHON
