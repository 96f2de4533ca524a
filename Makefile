# `make help` explains. Needs Rust, Python 3.10 or later with venv, and make; everything else is fetched.

CARGO ?= cargo
PYTHON ?= python3
# Where cargo builds. The command and the wheel are put into target/ in any case.
BUILD_DIR := $(or $(CARGO_TARGET_DIR),target)
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
E2E_ARGS ?=
SOAK_SECONDS ?= 600

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help build command wheel demo test test-rust test-docs test-python test-yama soak e2e bench bench-peers lint lint-rust lint-python doc clean

# $(call part,what it is,command): runs it and says how long it took.
define part
@printf '\n== %s\n' '$(1)'; began=$$SECONDS; \
if { $(2); }; then printf '== %s: %s s\n' '$(1)' $$((SECONDS - began)); \
else printf '== %s: FAILED after %s s\n' '$(1)' $$((SECONDS - began)); exit 1; fi
endef

help: ## Explain the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  DEMO_ARGS, BENCH_ARGS, E2E_ARGS and PYTEST_ARGS are passed on: make demo DEMO_ARGS="--tokens 2048"'
	@echo '  make soak SOAK_SECONDS=3600 lasts an hour'

build: command wheel ## Build target/release/kvferry and the wheel; install the wheel into .venv

command:
	$(call part,building the command,$(CARGO) build --release -p kvferry-cli)
	@mkdir -p target/release
	@if [ '$(abspath $(BUILD_DIR))' != '$(abspath target)' ]; then cp -f '$(BUILD_DIR)/release/kvferry' target/release/kvferry; fi

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	touch $@

$(VENV)/.build-tools: $(VENV)/.made
	$(BIN)/pip install --quiet 'maturin>=1.10,<2'
	touch $@

# A wheel of an earlier build is not left beside the new one: `e2e/run` and people take what is there.
wheel: $(VENV)/.build-tools
	@rm -f target/wheels/kvferry-*.whl
	$(call part,building the wheel,$(BIN)/maturin build --release --quiet --interpreter $(BIN)/python --out target/wheels)
	@$(BIN)/pip install --quiet --force-reinstall --no-deps target/wheels/kvferry-*.whl
	@ls target/wheels/kvferry-*.whl

demo: command ## Move the KV cache of a model between two processes, and say how fast
	target/release/kvferry demo $(DEMO_ARGS)

test: test-rust test-docs test-python ## Run all tests: Rust, documentation, Python

test-rust:
	$(call part,Rust tests,if $(CARGO) nextest --version >/dev/null 2>&1; \
	then $(CARGO) nextest run --workspace --no-fail-fast; else $(CARGO) test --workspace --no-fail-fast --lib --bins --tests; fi)

test-docs:
	$(call part,Rust documentation tests,$(CARGO) test --workspace --no-fail-fast --doc --exclude kvferry-python --exclude kvferry-python-module)

$(VENV)/.test-tools: $(VENV)/.made pyproject.toml
	$(BIN)/pip install --quiet --group test
	touch $@

test-python: build $(VENV)/.test-tools
	$(call part,Python tests,$(BIN)/python -m pytest $(PYTEST_ARGS))

# KVFERRY_VM: a program that boots a kernel with Yama and runs a command there with the files named:
# KVFERRY_VM -f FILE... -- COMMAND
test-yama: ## Test copying within a host under Yama, in a machine that KVFERRY_VM boots
	@if [ -z "$${KVFERRY_VM:-}" ]; then echo 'SKIPPED: Yama: set KVFERRY_VM to a program that boots a kernel with it'; else \
	test=$$($(CARGO) test -p kvferry --test survival --no-run --message-format=json 2>/dev/null \
	    | sed -n 's/.*"executable":"\([^"]*survival[^"]*\)".*/\1/p' | tail -1); \
	"$$KVFERRY_VM" -f "$$test" -- sh -ec "chmod 755 /; echo 1 > /proc/sys/kernel/yama/ptrace_scope; \
	    echo user::65534:65534::/tmp:/bin/sh > /etc/passwd; name=$$(basename "$$test"); \
	    for it in \$$(\$$name --list within:: | sed -n '/yama\|attach\|private_and_shared\|shared_memory/s/: test\$$//p'); do \
	    su user -c \"\$$name \$$it --exact --nocapture\"; done"; fi

soak: ## Every fault again and again for SOAK_SECONDS; counters back to zero, no growth
	$(call part,soak of $(SOAK_SECONDS) s,SOAK_SECONDS=$(SOAK_SECONDS) $(CARGO) test -p kvferry --test endurance soak:: -- --nocapture)

e2e: build ## Run real vLLM, prefill and decode, on kvferry (builds its environment in the cache first)
	$(call part,end to end,e2e/run $(E2E_ARGS))

bench: build ## Measure beside the machine's own limits
	target/release/kvferry bench $(BENCH_ARGS)

bench-peers: build ## Measure beside Mooncake and NIXL (installs them in the cache first)
	$(call part,side by side,bench/peers/run $(BENCH_ARGS))

lint: lint-rust lint-python ## Check formatting and style of everything

lint-rust:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny check; else echo 'cargo-deny is not installed: deny.toml is not checked'; fi

$(VENV)/.lint-tools: $(VENV)/.made pyproject.toml
	$(BIN)/pip install --quiet --group lint
	touch $@

lint-python: $(VENV)/.lint-tools
	$(BIN)/ruff format --check python bench
	$(BIN)/ruff check python bench
	$(BIN)/mypy

doc: ## Build the Rust documentation; warnings are errors
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps

clean: ## Remove what was built here; caches outside the checkout stay
	$(CARGO) clean
	rm -rf target $(VENV) .pytest_cache .mypy_cache .ruff_cache
	find python e2e bench -name __pycache__ -type d -prune -exec rm -rf {} +
