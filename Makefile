# Two commands do everything on a fresh machine: `make demo` (no root) and `make test` (root also runs the lab).
PYTHON ?= python3
VENV   := build/venv
BIN    := $(VENV)/bin
# -qq: pip's notes about empty find-links directories are noise here; its errors still show
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
TORCH  := torch==2.13.0
INVENTORY ?= inventory/local.yaml
QUESTION  ?= Why is the sky blue? Answer in two sentences.

.PHONY: demo demo-down test lint soak bench venv clean golden

venv: $(VENV)/.operator

$(VENV)/.created:
	@echo "==> making the virtual environment $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "fleet needs Python 3.10 or newer: make PYTHON=python3.11 …" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "next: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.operator: $(VENV)/.created pyproject.toml
	@echo "==> installing the operator's tools (about half a minute)"
	@$(PIP) install --editable '.[operator]'
	@touch $@

# torch first and alone, so that nothing else decides which build comes in
$(VENV)/.test: $(VENV)/.operator
	@echo "==> installing what the tests need, $(TORCH) among it (about two minutes)"
	@if [ -n "$(TORCH_SOURCE)" ] && [ -d "$(TORCH_SOURCE)" ]; then $(PIP) install --find-links "$(TORCH_SOURCE)" "$(TORCH)"; \
	 elif [ -n "$(TORCH_SOURCE)" ]; then $(PIP) install "$(TORCH_SOURCE)"; else $(PIP) install "$(TORCH)"; fi
	@$(PIP) install --editable '.[test]'
	@touch $@

demo: $(VENV)/.operator
	@echo "==> gathering wheels and the model (fleet bundle $(INVENTORY))"
	@$(BIN)/fleet bundle $(INVENTORY)
	@echo "==> bringing up three stage boxes and a control box in directories below build/ (fleet provision $(INVENTORY))"
	@$(BIN)/fleet provision $(INVENTORY)
	@echo "==> asking the three stages (fleet ask -i $(INVENTORY) \"$(QUESTION)\")"
	@$(BIN)/fleet ask -i $(INVENTORY) "$(QUESTION)"
	@echo "==> who holds which layers (fleet status -i $(INVENTORY))"
	@$(BIN)/fleet status -i $(INVENTORY)
	@echo "==> the site runs on; ask it more with: $(BIN)/fleet ask -i $(INVENTORY) \"…\"; stop it with: make demo-down"

demo-down: $(VENV)/.operator
	@$(BIN)/fleet down $(INVENTORY)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.test lint
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m tests.lab.packages; fi
	@$(BIN)/pytest -m 'not soak' $(PYTEST_ARGS)
	@if [ "$$(id -u)" != 0 ]; then echo "NOT RUN: the tests on lab boxes need root (sudo make test); everything else ran."; fi

soak: $(VENV)/.test
	@$(BIN)/pytest -m soak $(PYTEST_ARGS)

bench: $(VENV)/.test
	@for script in benchmarks/*.py; do echo "==> $$script"; $(BIN)/python $$script || exit 1; done

# the reference tokens, from the shards of the bundle, with transformers in FP32
golden: $(VENV)/.test
	@$(BIN)/python -m tests.golden.make_golden

clean:
	rm -rf build
