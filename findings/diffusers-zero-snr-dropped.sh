#!/usr/bin/env bash
# diffusers 0.42.1: some schedulers drop `rescale_betas_zero_snr` of a model's config without a word.
# Guess: a scheduler that is made of another's config keeps the noise schedule, or says that it cannot.
# Seen: DDIM, Euler, DPM++ and UniPC end at a signal of 0 (or 2**-24); Heun, PNDM, single-step DPM, KDPM2, LMS and DEIS at .0047,
# as the model without the setting.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 transformers==5.23.0 scipy==1.16.3
"$trial/env/bin/python" - <<'PYTHON'
import diffusers

config = {
    "num_train_timesteps": 1000, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
    "rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing",
}
keep = "DDIM EulerDiscrete DPMSolverMultistep UniPCMultistep".split()
drop = "HeunDiscrete PNDM DPMSolverSinglestep KDPM2Discrete LMSDiscrete DEISMultistep".split()
for name in (*keep, *drop):
    last = float(getattr(diffusers, f"{name}Scheduler").from_config(config).alphas_cumprod[-1])
    print(diffusers.__version__, name, last)
    assert (last < 1e-6) is (name in keep), "this has changed"
PYTHON
