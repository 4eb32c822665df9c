PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=
DOCS_VERSION = $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
# Imports are compiled once, also where the environment forbids it: `import torchrl` then takes 7 s instead of 19.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test coverage train soak docs docs-serve docs-version lint clean

# Everything: style, types and tests.
test: $(INSTALLED) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

# The same, and how much of the package the tests run; counting makes many of them take twice as long.
coverage: $(INSTALLED)
	$(MAKE) test ARGS="--cov --cov-fail-under=95 $(ARGS)"

# The main job; options go along as in `make train ARGS="env=InvertedPendulum total_frames=15000"`.
train: $(INSTALLED)
	$(BIN)/python recipes/sac.py env=Walker2d $(ARGS)

# Long tests of kills, full disks and many writers, and a ring buffer that is written for an hour.
# NMER_SOAK is how many times longer than in `make test` the tests run. Property tests draw new
# examples each time; a failure prints the seed, and `make soak SEED=...` draws the same again.
NMER_SOAK ?= 25
SOAK_MINUTES ?= 60
ifndef SEED
SEED := $(shell date +%s)
endif
SOAK := OMP_NUM_THREADS=1 NMER_SOAK=$(NMER_SOAK) $(BIN)/python -m pytest --hypothesis-profile=soak --hypothesis-seed=$(SEED)
soak: $(INSTALLED)
	$(SOAK) tests -m hypothesis --ignore=tests/reliability $(ARGS)
	$(SOAK) tests/reliability -s $(ARGS)
	$(BIN)/python recipes/benchmarks/soak.py million
	$(BIN)/python recipes/benchmarks/soak.py ring --minutes $(SOAK_MINUTES)

# The site, into site/; a warning is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The same while you write, at the address that it prints.
docs-serve: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

# The site of this version, as a commit to the branch gh-pages beside those of other versions. Versions
# that differ in their last number share one site. mike starts mkdocs by its name, hence the PATH.
docs-version: $(INSTALLED)
	export NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" && mike deploy --update-aliases $(DOCS_VERSION) latest && mike set-default latest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Installs once, and again only when what is to be installed has changed.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[tests]"
	touch $@

clean:
	rm -rf $(VENV) site
