# `make train` and `make test` do everything, from a fresh clone on. Both are cheap to run again.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?= +workflow=ppo
# ARGS without a workflow still means PPO: `make train ARGS="model=tiny"`.
TRAIN_ARGS = $(if $(findstring workflow,$(ARGS)),$(ARGS),+workflow=ppo $(ARGS))

.DEFAULT_GOAL := help
.PHONY: help train test check bench install clean

help:  ## show this
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

train: install  ## install, then python -m rlinf.train +workflow=ppo (ARGS="..." passes overrides)
	$(PY) -m rlinf.train $(TRAIN_ARGS)

test: check  ## install, then ruff, mypy and all tests (ARGS="..." passes arguments to pytest)
	$(PY) -m pytest $(if $(filter-out +workflow=ppo,$(ARGS)),$(ARGS))

check: install  ## ruff, mypy, docs/config.md up to date
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m rlinf.config_docs --check docs/config.md

bench: install  ## the benchmarks, each ending in a line of JSON
	@for script in benchmarks/*.py; do echo "== $$script"; $(PY) $$script || exit 1; done

install:  ## make .venv and install (again only when setup.py changed)
	@$(PYTHON) install.py $(VENV)

clean:  ## remove .venv and caches
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
