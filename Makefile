# make serve    install what is missing, start the server with its learner on the embedded model
# make test     install what is missing, run lint, types, import rules and all tests
# make install | lint | fast | clean
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
WANTED := $(shell cat requirements/cpu.lock requirements/torch.txt pyproject.toml | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(WANTED)
# Arguments for paceline serve, for example: make serve ARGS="--port 8001"
ARGS ?=

.PHONY: serve test install lint fast clean
serve: install
	exec $(BIN)/paceline serve $(ARGS)

test: lint
	$(BIN)/python -m pytest

fast: lint
	$(BIN)/python -m pytest -m "not slow"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(STAMP)

# The stamp is named after what it stands for and made last: a changed lock or an interrupted
# installation is repaired by the next run, and a finished one is not repeated.
$(STAMP):
	@python=$$(command -v python3.11 || command -v python3); \
	 [ "$$($$python -c 'import sys; print(sys.version_info[:2] == (3, 11))' 2>/dev/null)" = True ] || \
	 { echo "Python 3.11 is needed (python3.11 on the PATH)" >&2; exit 2; }; \
	 [ -x $(BIN)/python ] && $(BIN)/python -c '' 2>/dev/null || $$python -m venv --clear $(VENV)
	rm -f $(VENV)/.installed-*
	$(PIP) install --no-deps -r requirements/torch.txt || \
	 { $(PIP) install uv && $(BIN)/uv pip install --python $(BIN)/python --no-deps \
	   --torch-backend=cpu torch==2.13.0; }
	$(PIP) install --no-deps --require-hashes -r requirements/cpu.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
