# make serve    install what is missing, start the server with its learner on the embedded model
# make test     install what is missing, run lint, types, import rules and all tests
# make install | lint | fast | browser | clean
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
WANTED := $(shell cat requirements/cpu.lock requirements/torch.txt pyproject.toml | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(WANTED)
# Arguments for paceline serve, for example: make serve ARGS="--port 8001"
ARGS ?=

.PHONY: serve test install lint fast browser clean
serve: install
	exec $(BIN)/paceline serve $(ARGS)

test: lint browser
	$(BIN)/python -m pytest

fast: lint
	$(BIN)/python -m pytest -m "not slow"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The dashboard's tests drive a real browser.
browser:
	@command -v chromium >/dev/null || \
	 { [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
	 { echo "the dashboard's tests need chromium: apt-get install chromium" >&2; exit 2; }

install: $(STAMP)

# The stamp is named after what it stands for and made last: a changed lock or an interrupted
# installation is repaired by the next run, and a finished one is not repeated.
$(STAMP):
	@is311='import sys; sys.exit(sys.version_info[:2] != (3, 11))'; \
	 if $(BIN)/python -c "$$is311" 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1 && \
	    grep -q "$(CURDIR)/$(VENV)" $(BIN)/activate; then exit 0; fi; \
	 [ ! -e $(VENV) ] || echo "$(VENV) is no working Python 3.11 environment of this folder: made anew"; \
	 for python in python3.11 python3; do \
	   if $$python -c "$$is311" 2>/dev/null; then exec $$python -m venv --clear $(VENV); fi; \
	 done; \
	 echo "Python 3.11 is needed: install python3.11 (with its venv module) onto the PATH" >&2; exit 2
	rm -f $(VENV)/.installed-*
	@# pip writes RECORD last; without one, a package was cut off and pip would take it as installed.
	@for info in $(VENV)/lib/python3.11/site-packages/*.dist-info; do \
	   [ ! -d "$$info" ] || [ -f "$$info/RECORD" ] || rm -rf "$$info"; done
	$(PIP) install --no-deps -r requirements/torch.txt || \
	 { $(PIP) install uv && $(BIN)/uv pip install --python $(BIN)/python --no-deps \
	   --torch-backend=cpu torch==2.13.0; }
	$(PIP) install --no-deps --require-hashes -r requirements/cpu.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
