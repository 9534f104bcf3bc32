.PHONY: setup demo test test-fast test-here test-integration test-front test-slurm test-full lint clean

unexport PYTHONDONTWRITEBYTECODE  # else every process compiles all of our modules anew
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export DO_NOT_TRACK ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

PY := .venv/bin/python
SEED ?= 0
REPORTS := .test-reports

setup:
	@./setup.sh

demo: setup  ## a tiny model learns two-digit addition; SEED=n changes the seed
	@.venv/bin/slipstream demo --seed $(SEED)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test-fast: setup  ## types, style and the unit tests
	@$(MAKE) --no-print-directory lint
	HF_HUB_OFFLINE=1 $(PY) -m pytest -n 2 tests/unit

test: setup  ## everything that runs here: unit tests, exactness of model and loss, real servers, learners and flows, a real SLURM
	@rm -rf $(REPORTS)
	@$(MAKE) --no-print-directory lint
	HF_HUB_OFFLINE=1 $(PY) -m pytest -n 2 --junitxml=$(REPORTS)/unit.xml tests/unit tests/model
	@$(MAKE) --no-print-directory -j 2 test-here test-slurm; code=$$?; \
	$(PY) -m tests.slowest $(REPORTS); exit $$code

test-integration: setup  ## real servers, learners and flows on this machine
	HF_HUB_OFFLINE=1 nice -n 5 $(PY) -m pytest -v -n 2 --dist loadfile --junitxml=$(REPORTS)/integration.xml tests/integration 2>&1 | (trap "" INT TERM; exec sed -u "s/^/integration: /")

test-front: setup  ## the Prefect front door: real server, workers, runs and Chromium; without a browser those tests are skipped
	@$(PY) -m tests.browser.install --if-possible
	HF_HUB_OFFLINE=1 nice -n 5 $(PY) -m pytest -v -n 2 --dist loadfile --junitxml=$(REPORTS)/front.xml tests/front 2>&1 | (trap "" INT TERM; exec sed -u "s/^/front: /")

test-here: setup  ## both of them, one after the other, each whatever became of the other
	@$(MAKE) --no-print-directory test-integration; code=$$?; $(MAKE) --no-print-directory test-front && exit $$code

test-slurm: setup  ## runs on a real SLURM: the test bed (root, Debian), skipped with the reason where there can be none
	@$(PY) slurm/testbed install --if-possible
	@$(PY) -m tests.browser.install --if-possible
	HF_HUB_OFFLINE=1 $(PY) -m pytest -v --junitxml=$(REPORTS)/slurm.xml -m "not full" tests/slurm 2>&1 | (trap "" INT TERM; exec sed -u "s/^/slurm: /")

test-full: test  ## besides, every row of the recovery table on the full stack (hours)
	@$(PY) slurm/testbed install --if-possible
	HF_HUB_OFFLINE=1 $(PY) -m pytest -v --durations=10 -m full tests/slurm

clean:
	rm -rf .venv .venv-vllm runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .test-cache $(REPORTS)
