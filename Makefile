# Two commands do everything on a fresh machine: `make demo` (no root) and `make test` (root also runs the lab).
PYTHON ?= python3
VENV   := build/venv
BIN    := $(VENV)/bin
# -qq: pip's notes about empty find-links directories are noise here; its errors still show
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
TORCH  := torch==2.13.0
INVENTORY ?= inventory/local.yaml
QUESTION  ?= Why is the sky blue? Answer in two sentences.

.PHONY: demo demo-down test lint soak soak-golden soak-ring soak-heal soak-guards bench venv clean golden
.PHONY: help
.DEFAULT_GOAL := help

help:
	@echo "make demo       a site of three stages on this machine, without root; a box is killed in mid-answer, and the answer finishes"
	@echo "make demo-down  stops it (build/ keeps what it made; make demo starts it again in seconds)"
	@echo "make test       lint, types and all tests; as root also those on lab boxes (systemd, sshd, own disk)"
	@echo "make lint       ruff and mypy only"
	@echo "make soak       long tests        make bench   benchmarks        make golden  reference tokens anew"
	@echo "make venv       the virtual environment $(VENV) with the command fleet        make clean   removes build/"
	@echo "Settings: TORCH_SOURCE=DIR_OR_WHEEL  PYTHON=python3.11  INVENTORY=FILE  QUESTION=\"…\"  PYTEST_ARGS=\"-k word\""

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
	@echo "==> gathering wheels and the model: about a minute the first time (fleet bundle $(INVENTORY))"
	@$(BIN)/fleet bundle $(INVENTORY)
	@echo "==> bringing up three stage boxes and a control box below build/: about a minute the first time (fleet provision $(INVENTORY))"
	@$(BIN)/fleet provision $(INVENTORY)
	@echo "==> asking the three stages (fleet ask -i $(INVENTORY) \"$(QUESTION)\")"
	@$(BIN)/fleet ask -i $(INVENTORY) "$(QUESTION)"
	@echo "==> killing the stage of box2 in mid-answer: the answer finishes (fleet drill kill box2 --show --yes -i $(INVENTORY))"
	@$(BIN)/fleet drill kill box2 --streams 2 --show --yes -i $(INVENTORY)
	@echo "==> what happened, and how long each phase took (fleet events -i $(INVENTORY))"
	@$(BIN)/fleet events -i $(INVENTORY) --limit 10
	@echo "==> who holds which layers (fleet status -i $(INVENTORY))"
	@$(BIN)/fleet status -i $(INVENTORY)
	@echo "==> the site runs on. Ask it more, and stop it with:"
	@echo "    $(BIN)/fleet ask -i $(INVENTORY) \"Name three rivers.\""
	@echo "    make demo-down"

demo-down: $(VENV)/.operator
	@$(BIN)/fleet down $(INVENTORY)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.test lint
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m tests.lab.packages; fi
	@$(BIN)/pytest $(PYTEST_ARGS)
	@if [ "$$(id -u)" != 0 ]; then echo "NOT RUN: the tests on lab boxes need root (sudo make test); everything else ran."; fi

# long lists, one target a room; finished cases are kept in build/soak/<room>.jsonl and left out the next time
soak: soak-golden soak-ring soak-heal soak-guards

soak-golden: $(VENV)/.test
	@$(BIN)/pytest -m soak tests/golden $(PYTEST_ARGS); code=$$?; [ $$code = 5 ] && echo "every case has passed at this commit" || exit $$code

soak-ring: $(VENV)/.test
	@$(BIN)/pytest -m soak tests/stage_runtime $(PYTEST_ARGS); code=$$?; [ $$code = 5 ] && echo "every case has passed at this commit" || exit $$code

# 220 faults on lab boxes in less than an hour; counts and pauses of each are kept in build/soak/heal.jsonl
soak-heal: $(VENV)/.test
	@if [ "$$(id -u)" != 0 ]; then echo "the lab of real boxes needs root: sudo make soak-heal" >&2; exit 1; fi
	@$(BIN)/python -m tests.lab.packages
	@$(BIN)/pytest -m soak tests/site $(PYTEST_ARGS); code=$$?; [ $$code = 5 ] && echo "every case has passed at this commit" || exit $$code

# simulated boxes and leaks, with fresh seeds; the figures of each are kept in build/soak/guards-figures.jsonl
soak-guards: $(VENV)/.test
	@$(BIN)/pytest -m soak tests/guards $(PYTEST_ARGS); code=$$?; [ $$code = 5 ] && echo "every case has passed at this commit" || exit $$code

# about five minutes on a quiet machine; finished rounds lie in build/benchmarks/, BENCH_ARGS=--fresh measures them again
bench: $(VENV)/.test
	@$(BIN)/python -m benchmarks.decode $(BENCH_ARGS)

# the reference tokens, from the shards of the bundle, with transformers in FP32
golden: $(VENV)/.test
	@$(BIN)/python -m tests.golden.make_golden $$($(BIN)/python -c 'from tests.models import smollm2_directory; print(smollm2_directory())' | tail -n 1)

clean:
	rm -rf build
