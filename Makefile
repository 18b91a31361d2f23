# `make demo` and `make test` do everything on a fresh machine: environment, installation, run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TYPES := build/types/pyro_nngp

export MPLBACKEND := Agg

.PHONY: demo test lint smoke docs linkcheck pictures clean

demo: $(INSTALLED)
	$(BIN)/python tutorials/demo.py --out demo

# Bytecode is kept whatever the environment says: else each process compiles the package and the tests again.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto

# Every tutorial, the demo among them, at a size that takes seconds.
smoke: $(INSTALLED)
	set -e; for script in tutorials/*.py; do echo "== $$script"; $(BIN)/python $$script --smoke; done

# The site, with every tutorial executed: in minutes at full size, in seconds each with SMOKE=1. INTERSPHINX=1 adds links
# to the pages of torch, Pyro, ArviZ and NumPy, for which it needs a network.
docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

linkcheck: $(INSTALLED)
	$(BIN)/sphinx-build -D nb_execution_mode=off -b linkcheck docs docs/_build/linkcheck

# The pictures of the front page, from a run of the demonstration.
pictures: demo
	$(BIN)/python docs/pictures.py demo

# mypy sees models/ and inference/ where the wheel puts them.
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPES) && mkdir -p $(TYPES)
	ln -s $(CURDIR)/pyro_nngp/* $(CURDIR)/models $(CURDIR)/inference $(TYPES)/
	MYPYPATH=build/types $(BIN)/mypy

# torch first and pinned: left to itself, pip takes the newest build.
$(INSTALLED): pyproject.toml setup.py $(wildcard pyro_nngp/native/*.cpp pyro_nngp/native/*.h) constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cpu,test]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo docs/_build *.egg-info
