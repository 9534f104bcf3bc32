.PHONY: setup demo test test-fast test-slurm test-full lint clean

export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export DO_NOT_TRACK ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false

PY := .venv/bin/python
SEED ?= 0

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

test: setup  ## everything: unit tests, exactness of model and loss, then real servers, learners and flows
	@$(MAKE) --no-print-directory lint
	HF_HUB_OFFLINE=1 $(PY) -m pytest -n 2 tests/unit tests/model
	HF_HUB_OFFLINE=1 $(PY) -m pytest tests/integration

test-slurm: setup  ## the SLURM test bed (root, Debian)
	@$(PY) slurm/testbed install --if-possible
	HF_HUB_OFFLINE=1 $(PY) -m pytest -m "not full" tests/slurm

test-full: test  ## besides, every row of the recovery table on the full stack (hours)
	@$(PY) slurm/testbed install --if-possible
	HF_HUB_OFFLINE=1 $(PY) -m pytest -m full tests/slurm

clean:
	rm -rf .venv .venv-vllm runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
