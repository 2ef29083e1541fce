# Every target makes what it needs: on a fresh machine `make serve` is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

LITELLM := .venv-litellm

.PHONY: serve test test-e2e test-faults test-litellm check proto wheel peers clean

# Runs a router, one prefill worker and one decode worker on this machine until Ctrl-C.
serve: $(STAMP)
	$(BIN)/splitserve up

# Every test that needs neither Docker nor hours. Those without a cluster share the cores, file by file; a cluster of real
# processes wants them all. The second part runs also when the first one fails; a test process that dies is not replaced,
# because pytest-xdist then waits for ever.
test: $(STAMP)
	@failed=0; \
	$(BIN)/python -m pytest -m "not cluster and not e2e and not faults" -n auto --maxprocesses 4 --dist loadfile --max-worker-restart 0 || failed=1; \
	$(BIN)/python -m pytest -m "cluster and not e2e and not faults" || failed=1; \
	exit $$failed

# The tests that need a Docker engine.
test-e2e: $(STAMP)
	$(BIN)/python -m pytest -m e2e

# The whole fault matrix cell by cell, then any cell again and again, over ZeroMQ and over Gloo; FAULT_ROUNDS and
# FAULT_SEED say how often and from where.
test-faults: $(STAMP)
	$(BIN)/python -m pytest -m "matrix or faults"

# litellm, as a library and as a proxy, in front of a cluster. It has an environment of its own; once that is made,
# 'make test' runs these tests too.
test-litellm: $(STAMP) $(LITELLM)/.installed
	$(BIN)/python -m pytest tests/cluster/clients/test_litellm.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.proto_freshness

# Makes the stubs anew from proto/.
proto: $(STAMP)
	$(BIN)/python -m tests.proto_freshness --write

# Other servers for 'splitserve bench peers', each in an environment of its own; takes gigabytes and most of an hour. One
# that cannot be had here is skipped with the reason.
peers: $(STAMP)
	$(BIN)/python -P -m splitserve.bench.peers.environments .peers

wheel: $(STAMP)
	$(BIN)/python -m build --no-isolation

# The constraints pin every version; torch comes first and alone, so that no other package's range picks its build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "splitserve needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	@# An environment without pip is what an interrupted start, or a Python without ensurepip, leaves behind.
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[serve,deploy,bench,dev]'
	touch $(STAMP)

$(LITELLM)/.installed: tests/cluster/clients/litellm.txt
	$(PYTHON) -m venv --clear $(LITELLM)
	$(LITELLM)/bin/python -m pip install --quiet --only-binary :all: --requirement tests/cluster/clients/litellm.txt
	touch $@

clean:
	rm -rf $(VENV) $(LITELLM) .peers dist build
