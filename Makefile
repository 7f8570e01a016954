# Every target sets a fresh machine up first: a virtual environment in .venv, rebuilt when pyproject.toml changes.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := demo
.PHONY: demo test fault lint clean

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/fisedit-ready
EMOJI := /usr/share/fonts/truetype/noto/NotoColorEmoji.ttf

demo: $(STAMP)
	$(BIN)/fisedit demo

test: lint $(EMOJI)
	$(BIN)/python -m pytest

# Kills, hangs, full and read-only disks, crowds; writes docs/reliability.md.
fault: $(STAMP)
	$(BIN)/python -m tests.reliability_table

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The font that the demo model's scenes are drawn with; only the tests of the training need it.
$(EMOJI):
	@if command -v apt-get > /dev/null; then \
	  sudo=$$([ "$$(id -u)" = 0 ] || command -v sudo || true); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -qq -y fonts-noto-color-emoji; \
	else \
	  echo "Install the font Noto Color Emoji: the tests of the training need $@"; \
	fi
