# `make demo` finds a bug, `make explore` fuzzes the bundled kernels, `make test` checks a change. All make .venv first.
#
#   make explore BUDGET=10m KERNELS='paged_*'
#   make test PYTHON=python3.12
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: demo explore test test-all triton-versions lint types compiled unit quality plain hacks vendor audit docs \
	pictures format clean

unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BUDGET ?= 5m
KERNELS ?=
TRITON ?= 3.6.0 3.7.1 newest
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTABLE := $(VENV)/.testable
# One more than there are cores: tests wait for processes of their own.
WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Each file in one of them, which pytest-xdist could do too; but each of its workers would import and collect everything.
FORKED = -p tests.forked_workers --forks $(WORKERS)

# A bug found in some 20 s, replayed, repaired and replayed: the broken kernel of docs/first-finding.md, in build/demo.
demo: $(INSTALLED)
	$(BIN)/python docs/demo.py

explore: $(INSTALLED)
	$(BIN)/attnfuzz explore $(KERNELS) --budget $(BUDGET)

# What tests import is compiled first: else each of the many processes of a test run would do it again. Types are checked
# while tests run, which wait now and then.
test: $(TESTABLE)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint compiled
	$(MAKE) --no-print-directory --jobs=2 types unit

# What a change is not kept waiting for: every planted bug, campaigns that are killed, hostile files by the dozen.
test-all: lint types
	$(BIN)/python -m pytest $(FORKED) --attnfuzz-profile all

# The kernels and the interpreter with each Triton that attnfuzz says it takes; TRITON=newest-torch for the newest torch.
triton-versions: $(TESTABLE)
	WORKERS=$(WORKERS) .ci/triton-versions $(VENV) $(TRITON)

lint: $(TESTABLE)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(TESTABLE)
	$(BIN)/python -m mypy

compiled: $(TESTABLE)
	$(BIN)/python -m compileall -q attnfuzz kernels strategies
	-$(BIN)/python -m pytest --collect-only -qq -m 'not night' >/dev/null 2>&1  # tests say what is wrong

unit: $(TESTABLE)
	$(BIN)/python -m pytest $(FORKED) -m 'not night'

# The catalogue of planted bugs in docs/; time to find and shrunk size of each, in build/.
quality: $(TESTABLE)
	mkdir -p build
	$(BIN)/python -m tests.quality.catalogue docs/quality.md
	$(BIN)/python -m tests.quality build/quality.md

# What a newcomer is told of plain kernels, what becomes of kernels that only look right, what other projects' tests find.
plain hacks vendor: $(TESTABLE)
	$(BIN)/python -m tests.$@

# Tens of thousands of hostile files, settings and entries, and kills at random moments: for the night.
audit: $(TESTABLE)
	$(BIN)/python -m tests.audit

# The site of docs/, in build/docs; a warning is an error.
docs: $(TESTABLE)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html --conf-dir docs . build/docs
	@echo 'The site is in build/docs: open build/docs/index.html'

# What docs/pictures/ shows, from a campaign of half a minute on a CPU; the report needs Chromium.
pictures: $(TESTABLE)
	$(BIN)/python docs/pictures.py

format: $(TESTABLE)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# What users install, and that with what the tests need.
$(INSTALLED): pyproject.toml constraints.txt .ci/install
	.ci/install '$(PYTHON)' $(VENV)
	touch $@

$(TESTABLE): pyproject.toml constraints.txt .ci/install
	.ci/install '$(PYTHON)' $(VENV) test
	touch $(INSTALLED) $@
