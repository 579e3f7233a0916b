# Set-up and everyday commands. Needs Python 3.11 or newer with pip, and make; everything else goes into .venv.
#
#   make demo        fetch the default model and stream a real answer
#   make serve       serve the default model over HTTP
#   make test        lint, types, architecture, tests
#   make test-extra  tests of clusters, with Ray in an environment of its own, of clients likewise, a soak, emulated Arm
#   make test-real   tests with real models, which it fetches (2.1 GB) unless LLM_WORKER_REAL_MODELS has them
#   make docs        build the documents as a site in site/
#   make pages       write the generated pages and the chart from the saved runs in docs/results
#   make evidence    measure everything that they show again (half an hour on a quiet machine), and write them
#   make wheels      build a pure wheel, and one with the CPU kernels compiled for this kind of machine, in dist/
#   make clean       remove the environments and everything built

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -q --no-compile
# The environment is tied to its Python and its place: it records them once it works, and is recreated for others.
ORIGIN := import os, sys; print(sys.version, sys.base_prefix, os.getcwd(), sep="\n")
STALE := $(shell test "$$("$(PYTHON)" -c '$(ORIGIN)' 2>/dev/null)" = "$$(cat $(VENV)/.made 2>/dev/null)" || echo FORCE)
# pip writes RECORD last, but takes a package without one, left by an interrupted install, for installed.
FORGET_HALVES := for info in $(VENV)/lib/python*/site-packages/*.dist-info; do \
	test -e "$$info/RECORD" || rm -rf "$$info"; done
# Tests wait for limits and for processes that start: one more than the cores keeps these busy.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)
CHROMIUM ?= /usr/bin/chromium
DEMO_PROMPT ?= What is the capital of France, and what is it famous for? Answer in one sentence.

# Bytecode is made when it is needed and kept, even where the environment forbids it: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo serve test test-agents test-clients test-extra test-real test-cluster browser lint types docs pages evidence clean
.PHONY: kernels wheels pytest help FORCE

help:
	@sed -n '3,13s/^# *//p' Makefile

demo: $(VENV)/.core
	@$(BIN)/python -m llm_worker_rbee run --temperature 0 --max-tokens 32 "$(DEMO_PROMPT)"

# Options for the command: make serve SERVE="--port 9000".
serve: $(VENV)/.core
	@exec $(BIN)/python -m llm_worker_rbee serve $(SERVE)

# One thread for each test process: the machine's cores are shared out among them. The tests of a file run in one process,
# which makes their servers and models once, the slow files first (tests/conftest.py). Reasons of skips are printed.
# mypy runs beside them: it has one thread, and a process of tests that ends early leaves a core free. The library of
# kernels needs the core only: it is built while pip installs what the tests need.
test: $(VENV)/.core
	@$(MAKE) --no-print-directory -j3 kernels lint browser
	@$(MAKE) --no-print-directory -j2 types pytest

# CPU kernels as a library, once for these sources: the hundreds of processes that tests start neither compile nor import
# Numba.
kernels: $(VENV)/.core
	@! command -v $${CC:-cc} >/dev/null || PYTHONPATH="$(CURDIR)" $(BIN)/python tools/build_kernels.py host

wheels: $(VENV)/.dev
	@$(BIN)/python tools/build_kernels.py --wheel dist

pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Ray and its hundred packages stay out of the environment that everything else is tested in, and so do clients whose
# requirements exclude each other.
EXTRA_VENV := .venv-extra
CLIENTS := .venv-clients
test-extra: $(VENV)/.dev test-clients
	@$(MAKE) --no-print-directory VENV=$(EXTRA_VENV) test-cluster
	$(BIN)/python -m pytest --mutations 200000 tests/weights/test_gguf_fuzz.py
	LLM_WORKER_EXAMPLES=4 $(BIN)/python -m pytest tests/server/test_openapi_schemathesis.py tests/e2e/test_wheel.py
	LLM_WORKER_KILLS=200 $(BIN)/python -m pytest tests/engine/test_kv_store.py
	LLM_WORKER_SOAK_ROUNDS=60 $(BIN)/python -m pytest tests/cli/test_serve_soak.py
	LLM_WORKER_BATCH_LINES=10000 $(BIN)/python -m pytest -rs tests/extra/test_batch_kills.py
	LLM_WORKER_TRAIN=1 $(BIN)/python -m pytest -rs tests/extra/test_lora_training.py tests/extra/test_lora_64.py
	LLM_WORKER_EMULATE=1 $(BIN)/python -m pytest -rs tests/backends/cpu/test_emulated_arm.py tests/extra/test_kernel_libraries.py
	LLM_WORKER_WALKS=20 $(BIN)/python -m pytest -rs tests/extra/test_grammar_walks.py
	@$(MAKE) --no-print-directory test-agents

# Coding agents, with scripted answers and with a real model; without npm their tests are skipped.
AGENTS := @openai/codex@0.166.0 @anthropic-ai/claude-code@2.1.325
test-agents: $(VENV)/.dev
	@! command -v npm >/dev/null || npm install --silent --no-save --no-fund --no-audit --prefix $(CLIENTS)/agents $(AGENTS)
	LLM_WORKER_CLIENTS=$(CLIENTS) LLM_WORKER_AGENTS=1 $(BIN)/python -m pytest -rs tests/extra/test_coding_agents.py tests/real/test_agents.py

CLIENT_NAMES := $(basename $(notdir $(wildcard tests/extra/clients/*.txt)))
test-clients: $(VENV)/.dev $(CLIENT_NAMES:%=$(CLIENTS)/%/.made)
	LLM_WORKER_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest -rs tests/extra/test_python_clients.py

# Real models behind a real server, with clients that others wrote; tests/real/models.toml lists them.
test-real: $(VENV)/.dev $(CLIENT_NAMES:%=$(CLIENTS)/%/.made)
	LLM_WORKER_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest -rs tests/real

test-cluster: $(VENV)/.extra
	$(BIN)/python -m pytest --disable-warnings --confcutdir tests/cluster tests/cluster

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html, or serve it with a search box: $(BIN)/python -m http.server -d site"

pages: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.pages

# Options for it: make evidence EVIDENCE="--only micro --llama-bench PATH".
evidence: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.evidence $(EVIDENCE)

# Pages are tested in the system's Chromium. It is installed only as root on Debian with CI=true, where it is missing.
browser:
	@if test "$$CI" = true && test ! -x "$(CHROMIUM)" && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "Installing chromium for the tests of pages ..."; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 \
			install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
		|| echo "warning: chromium could not be installed: the tests of pages will be skipped" >&2; \
	fi

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/.dev
	$(BIN)/python -m mypy

# The newest pip, from the pip that is there, is there sooner than the one of the venv module, and installs in half of
# the time.
$(VENV)/.made: $(STALE)
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed: install it, or say make PYTHON=/path/to/python"; exit 1; }
	@echo "Making the environment in $(VENV) ..."
	@{ "$(PYTHON)" -m venv --clear --without-pip $(VENV) && "$(PYTHON)" -m pip --disable-pip-version-check \
		--python $(BIN)/python install -q --no-compile pip; } 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@$(PIP) --version >/dev/null
	@"$(PYTHON)" -c '$(ORIGIN)' >$@

$(VENV)/.core: pyproject.toml $(VENV)/.made
	@echo "Installing the core ..."
	@$(FORGET_HALVES)
	@$(INSTALL) -e '.[compile]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.core
	@echo "Installing what the tests need ..."
	@$(FORGET_HALVES)
	@$(INSTALL) -c constraints.txt -e '.[dev,docs]'
	@touch $@

$(VENV)/.extra: pyproject.toml constraints.txt $(VENV)/.core
	@echo "Installing Ray ..."
	@$(FORGET_HALVES)
	@$(INSTALL) -c constraints.txt -e '.[ray]' pytest pytest-timeout httpx
	@touch $@

$(CLIENTS)/%/.made: tests/extra/clients/%.txt | $(VENV)/.made
	@echo "Installing $* in an environment of its own ..."
	@$(BIN)/python -m venv --clear --without-pip $(@D)
	@$(PIP) --python $(@D)/bin/python install -q -r $<
	@touch $@

clean:
	rm -rf $(VENV) $(EXTRA_VENV) $(CLIENTS) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
