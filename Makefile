# Every target sets a fresh machine up first: a virtual environment in .venv, installed again when pyproject.toml changes.
# `demo` and `app` install what they need, everything else the developers' tools as well.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := demo
.PHONY: demo app test test-all test-avx2 run-tests coverage fault docs lint style types package clean

PYTHON ?= python3
BIN := .venv/bin
# One more than there are cores, as some tests wait for browsers and servers.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$(( cores < 4 ? cores + 1 : 5 )))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Where everything can be installed, a skipped test must have one of the reasons in tests/support/ceilings.py.
FULL := $(if $(shell command -v apt-get),--full)
STAMP := .venv/fisedit-ready
APP := .venv/fisedit-app-ready
TOOLS := .venv/fisedit-tools-ready
EMOJI := /usr/share/fonts/truetype/noto/NotoColorEmoji.ttf
CHROMIUM := $(or $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name)))),/usr/bin/chromium)

demo: $(STAMP)
	$(BIN)/fisedit demo

# Opens at http://127.0.0.1:7860; PORT=... takes another.
app: $(APP)
	$(BIN)/fisedit app --port $(or $(PORT),7860)

# Types are checked while the tests begin.
test: style $(EMOJI) $(CHROMIUM)
	$(MAKE) --no-print-directory --jobs=2 types run-tests

# Whole products of swept tests, and the slow ones.
test-all: style $(EMOJI) $(CHROMIUM)
	$(MAKE) --no-print-directory --jobs=2 types run-tests ALL=--all

# As a CPU without AVX-512 computes: other kernels, float32, and two threads where the other tests have one.
test-avx2: $(TOOLS)
	FISEDIT_CPU_DTYPE=fp32 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2 \
	  $(BIN)/python -m pytest tests/contract tests/masking tests/sparse_kernels/test_ops.py tests/app/test_program*.py

run-tests: $(TOOLS)
	$(PYTEST) $(ALL) $(FULL)

# Lines and branches of fisedit/ and app/ that `make test-all` runs.
coverage: $(TOOLS) $(EMOJI) $(CHROMIUM)
	$(PYTEST) --all --cov=fisedit --cov=app --cov-branch --cov-report=json:.coverage.json
	$(BIN)/python -m tests.support.coverage_table .coverage.json

# Kills, hangs, full and read-only disks, crowds; writes docs/reliability.md.
fault: $(TOOLS)
	$(BIN)/python -m tests.support.reliability_table

# The documents as a site, in out/site; what is made from the code is made anew.
docs: $(TOOLS)
	$(BIN)/python -m typer fisedit.cli utils docs --name fisedit --output docs/reference/cli.md
	$(BIN)/python -m benchmarks.row_diagram docs/rows.svg
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: style types

style: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_language.py

types: $(TOOLS)
	$(BIN)/mypy

# Builds sdist and wheel, and runs the wheel in an empty environment.
package: $(TOOLS)
	.ci/try-wheel $(BIN)/python

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

$(STAMP): pyproject.toml
	@echo "Setting up .venv: 1.5 GB, some minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable .
	touch $@

# sd-prompt-reader asks for Pillow 10; what the tests read files with runs on ours, and so it comes without what it asks for.
$(TOOLS): $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps sd-prompt-reader==1.3.5
	touch $@

$(APP): $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[app,lora]'
	touch $@

# Only tests need these: the font that the demo model's scenes are drawn with, and the browser that opens the app.
$(EMOJI): PACKAGE := fonts-noto-color-emoji
$(CHROMIUM): PACKAGE := chromium
$(EMOJI) $(CHROMIUM):
	@if command -v apt-get > /dev/null; then \
	  sudo=$$([ "$$(id -u)" = 0 ] || command -v sudo || true); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -qq -y $(PACKAGE); \
	else \
	  echo "There is no apt-get here. Tests need $@: install $(PACKAGE) in your system's way; without it they are skipped"; \
	fi
