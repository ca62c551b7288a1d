# Everything runs in .venv, which is made on first use and brought up to date when its inputs change.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
INSTALLED := $(VENV)/.installed
# The oldest versions that pyproject.toml allows, without TensorFlow: what a login node may have.
OLDEST := .venv-oldest
OLDEST_INSTALLED := $(OLDEST)/.installed
BOUNDS := $(shell sed -n 's/^dependencies = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
# What runs tests, where no linter is needed.
TEST_PACKAGES := hypothesis jsonschema pytest pytest-timeout pytest-xdist
# Other versions of TensorFlow and Keras than those of constraints.txt, each in an environment of its own.
COMPAT := oldest newest
SLOW := tests/zoo tests/chaos tests/cluster
STAGES := oldest units clusters timed
JOBS ?= auto
# Tests start hundreds of Pythons: what the first has compiled, the others need not.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test $(STAGES:%=test-%) check compat $(COMPAT:%=compat-%) lint format bench clean
.DELETE_ON_ERROR:

help: ## Say what there is to make
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do printf 'make %-7s %s\n' "$$name" "$$text"; done

demo: $(INSTALLED) ## Train the digits on a cluster of five processes on this machine
	$(RUN) tfdist_cli launch configs/local.yaml

test: $(STAGES:%=test-%) ## Run all tests

test-oldest: $(OLDEST_INSTALLED)
	$(OLDEST)/bin/python -m pytest -q -n $(JOBS) -m 'not slow and not tensorflow' tests/cli

test-units: $(INSTALLED)
	$(RUN) pytest -n $(JOBS) --dist worksteal --durations=40 $(addprefix --ignore=,$(SLOW))

test-clusters: $(INSTALLED)
	$(RUN) pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20 -m 'not timed' $(SLOW)

test-timed: $(INSTALLED)
	$(RUN) pytest -m timed $$(grep -rl --include='test_*.py' 'mark\.timed' $(SLOW))

check: lint ## Run linters and the tests that need neither TensorFlow nor a cluster, in 1 to 2 minutes
	$(RUN) pytest -n $(JOBS) --dist worksteal -m 'not slow and not tensorflow' $(addprefix --ignore=,$(SLOW) tests/train)

compat: test-oldest $(COMPAT:%=compat-%) ## Test with the oldest and the newest TensorFlow, Keras and other dependencies

$(COMPAT:%=compat-%): compat-%: .venv-compat-%/.installed
	$(<D)/bin/pip list --disable-pip-version-check 2>/dev/null | grep -E '^(keras|tensorflow)'
	$(<D)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m 'not slow' tests/train tests/task
	$(<D)/bin/python -m tfdist_cli launch configs/local.yaml --quiet --set train.epochs=2
	$(<D)/bin/python -m tfdist_cli launch configs/local_multi_worker_mirrored.yaml --quiet --set train.epochs=2

lint: $(INSTALLED) ## Run linters and the type checker
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

format: $(INSTALLED) ## Format the code and fix what can be fixed
	$(RUN) ruff check --fix
	$(RUN) ruff format

bench: $(INSTALLED) ## Measure tfdist beside its peers
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements.txt
	$(RUN) benchmarks --record benchmarks.jsonl

clean: ## Remove .venv, caches and builds; runs/ stays
	rm -rf $(VENV) $(OLDEST) $(COMPAT:%=.venv-compat-%) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	$(RUN) pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,dev]'
	touch $@

$(OLDEST_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(OLDEST)
	grep -vE '^($(shell echo '$(BOUNDS)' | sed 's/>=[^ ]*//g; s/ /|/g')|pydantic-core)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check --only-binary :all: -c $(OLDEST)/constraints.txt \
	  $(subst >=,==,$(BOUNDS)) -e . $(TEST_PACKAGES)
	touch $@

# A release candidate of TensorFlow brings keras-nightly, whose files take the place of Keras's.
.venv-compat-%/.installed: tests/compat/%.txt pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c $< -e '.[cpu,parquet]' fsspec $(TEST_PACKAGES)
	$(@D)/bin/pip uninstall --quiet --disable-pip-version-check --yes keras-nightly
	$(@D)/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps -c $< keras
	touch $@
