# The commands of this repository; CI runs these and nothing else.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
CLUSTER ?= 2ps4w
ARGS ?=
N ?= 20
MINUTES ?= 60
RUN ?=
DATA ?=
BUILD_ARGS ?=
PART ?=
TARGET ?= cpu
BIN := .venv/bin

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

train: .venv/run ## Train a CNN on handwritten digits with CLUSTER (2ps4w); ARGS="train.steps=500" for more
	$(BIN)/python -m trainer cluster=$(CLUSTER) $(ARGS)

test: $(if $(PART),.venv/extras,.venv/dev) ## Every promise tested once, in containers too where an engine answers; PART=3/16 adds a part of the rest
	$(if $(PART),TRAINER_TESTS_NEED_EXTRAS=1) $(PYTEST) $(if $(PART),--part $(PART),-m "not long")

test-fast: .venv/dev ## The quick tests, which start no cluster
	$(PYTEST) -m "not cluster and not slow and not long"

test-rest: .venv/extras ## What `make test` leaves out: the other cases of its tests, and long ones; PART=3/8 for an eighth
	TRAINER_TESTS_NEED_EXTRAS=1 $(PYTEST) -m long $(if $(PART),--part $(PART))

test-all: .venv/extras ## All tests
	TRAINER_TESTS_NEED_EXTRAS=1 $(PYTEST)

PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal
unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes: compiled once

chaos: CLUSTER = 2ps3w
chaos: .venv/run ## N runs of each kind of fault on CLUSTER (20, 2ps3w); each must give the same bits as an unbroken run
	$(BIN)/python -m trainer chaos cluster=$(CLUSTER) model=mlp train.steps=150 train.batch_size=48 \
	  checkpoint.every=20 history.every=1 chaos.random=$(N) $(ARGS)

soak: CLUSTER = 2ps3w
soak: .venv/run ## MINUTES (60) of random faults; every example must be counted exactly as often as expected, and nothing may leak
	$(BIN)/python -m trainer chaos cluster=$(CLUSTER) model=oracle data=oracle optimizer=sgd \
	  optimizer.learning_rate=48 train.batch_size=48 chaos.minutes=$(MINUTES) $(ARGS)

bench: .venv/dev ## Benchmark this trainer against others, in more than an hour; ARGS="workloads=[cnn]" for less
	$(BIN)/python -m bench $(ARGS)

bench-quick: .venv/dev ## A short benchmark, within 5 minutes: one workload, few rows
	$(BIN)/python -m bench quick=true $(ARGS)

export RUN DATA BUILD_ARGS

image: ## Build the image trainer:TARGET (cpu; gpu, test, tensorboard), with BUILD_ARGS for docker build
	compose/cluster.sh image $(TARGET)

cluster-up: ## Train on CLUSTER as containers, in the foreground; needs only Docker; DATA=PATH is mounted for the tasks
	@compose/cluster.sh up cluster=$(CLUSTER) $(ARGS)

cluster-start: ## Train on CLUSTER as containers, in the background
	@compose/cluster.sh start cluster=$(CLUSTER) $(ARGS)

cluster-ps: ## The containers of all clusters
	@compose/cluster.sh ps

cluster-logs: ## Follow the logs of RUN, or of the only cluster
	@compose/cluster.sh logs

cluster-down: ## Save, stop and remove RUN, or the only cluster
	@compose/cluster.sh down

cluster-tensorboard: ## Show the events of RUN, or of the only cluster, on 127.0.0.1:6006
	@compose/cluster.sh tensorboard

wheels: ## Fetch what `make image TARGET=cpu BUILD_ARGS="--network none"` installs, for a host without a network
	compose/cluster.sh wheels $(TARGET)

bench-containers: ## Time and size of the image, cold and warm, and the time to the first step
	compose/bench.sh

bench-tasks: .venv/dev ## What the launcher costs with up to 1,000 tasks, for which stand-ins answer
	$(BIN)/python -m bench.many_tasks $(ARGS)

bench-input: .venv/dev ## Share of a step that waits for data, for each available data set
	$(BIN)/python -m bench.input $(ARGS)

bench-links: .venv/dev ## Step times over links of 1 Gbit/s and 100 Mbit/s between network namespaces; needs root
	$(BIN)/python -m bench.links $(ARGS)

docs: .venv/docs ## Build the pages of docs/ into build/docs; any warning is an error, and so is a file from another host
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build -q -W --keep-going -n docs build/docs
	@! grep -rnE --include=*.html --include=*.css '$(FROM_ANOTHER_HOST)' build/docs

FROM_ANOTHER_HOST := <(script|img|iframe|source)[^>]*src="(https?:)?//|<link[^>]*href="(https?:)?//|(url\(|@import) *["'"'"']?(https?:)?//

check: .venv/dev ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy trainer bench
	$(BIN)/hadolint Dockerfile
	$(BIN)/shellcheck compose/*.sh requirements/install.sh

format: .venv/dev ## Apply the format and the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: .venv/dev ## Lock the requirements again, for every Python from 3.10 to 3.13
	$(BIN)/pip install --quiet uv
	for extra in cpu gpu; do $(LOCK) --extra $$extra -o requirements/$$extra.txt pyproject.toml; done
	$(LOCK) --group tensorboard -o requirements/tensorboard.txt
	$(subst 3.10,3.11,$(LOCK)) --group docs -c requirements/cpu.txt -o requirements/docs.txt
	$(LOCK) --extra cpu --group dev -c requirements/cpu.txt -o requirements/dev.txt pyproject.toml
	$(LOCK) --extra cpu $(addprefix --extra ,$(OPTIONAL)) --group extras -c requirements/cpu.txt \
	  -c requirements/dev.txt -o requirements/extras.txt pyproject.toml

OPTIONAL := hf mlflow onnx parquet sweep tfds wandb
LOCK := $(BIN)/uv pip compile -q --universal --generate-hashes --python-version 3.10 --no-annotate --no-header

clean: ## Remove what these commands made, except runs/
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else \
	  f"Python {v[0]}.{v[1]} found; 3.10 to 3.13 is needed: make PYTHON=/path/to/python3.12 ...")'
	$(PYTHON) -m venv .venv

.venv/run: requirements/cpu.txt pyproject.toml | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.venv/dev: .venv/run requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

# Optional packages (readers, exporters, loggers, sweeps); only long tests need them.
.venv/extras: .venv/dev requirements/extras.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/extras.txt
	@touch $@

# Sphinx needs Python 3.11.
.venv/docs: requirements/docs.txt | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/docs.txt
	@touch $@

.PHONY: help train test test-fast test-rest test-all chaos soak bench bench-quick bench-tasks \
  bench-input bench-links image cluster-up cluster-start cluster-ps cluster-logs cluster-down cluster-tensorboard wheels \
  bench-containers docs check format lock clean
