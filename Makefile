# `make help` explains. Needs Rust, Python 3.10 or later with venv, and make; everything else is fetched.

CARGO ?= cargo
PYTHON ?= python3
# Where cargo builds. The command and the wheel are put into target/ in any case.
BUILD_DIR := $(or $(CARGO_TARGET_DIR),target)
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
BENCH_ARGS ?=
BENCH_FILE_ARGS ?=
BENCH_HANDOFF_ARGS ?=
BENCH_OFFLOAD_ARGS ?=
DEMO_ARGS ?=
E2E_ARGS ?=
SOAK_SECONDS ?= 1200
SLOW_SKIP ?=
COUNTED_ARGS ?=
FUZZ_TARGETS ?=
WHEEL_BYTES_MAX := 9000000

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help build command command-dist wheel wheel-published wheel-dist wheel-measured demo test test-tools test-build test-wheel test-rust test-slow test-docs test-python test-yama test-gpu gpu-pack soak e2e e2e-gpu e2e-long bench bench-file bench-file-peers bench-store bench-store-peers bench-handoff bench-nixl bench-peers bench-scheduler bench-idle bench-vllm bench-offload bench-sglang bench-gpu bench-builds \
    bench-counted loom fuzz fuzz-minimise fuzz-coverage valgrind asan test-sanitizers lint lint-rust lint-format lint-clippy lint-deny lint-python \
    doc clean

# $(call part,what it is,command): runs it and says how long it took.
define part
@printf '\n== %s\n' '$(1)'; began=$$SECONDS; \
if { $(2); }; then printf '== %s: %s s\n' '$(1)' $$((SECONDS - began)); \
else printf '== %s: FAILED after %s s\n' '$(1)' $$((SECONDS - began)); exit 1; fi
endef

help: ## Explain the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  DEMO_ARGS, BENCH_ARGS, E2E_ARGS and PYTEST_ARGS are passed on: make demo DEMO_ARGS="--transport tcp"'
	@echo '  make soak SOAK_SECONDS=3600 lasts an hour'

build: command wheel ## Build target/release/kvferry and the wheel; install the wheel into .venv

# $(call command,profile): builds the command with that profile and puts it into target/PROFILE/kvferry.
define command
$(call part,building the command ($(1)),$(CARGO) build --profile $(1) -p kvferry-cli)
@mkdir -p target/$(1)
@if [ '$(abspath $(BUILD_DIR))' != '$(abspath target)' ]; then cp -f '$(BUILD_DIR)/$(1)/kvferry' target/$(1)/kvferry; fi
endef

command:
	$(call command,release)

command-dist: ## Build target/dist/kvferry as it is shipped and measured: takes three times as long
	$(call command,dist)

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	touch $@

$(VENV)/.build-tools: $(VENV)/.made
	$(BIN)/pip install --quiet 'maturin>=1.10,<2'
	touch $@

# $(call clibs,profile,environment): the C libraries, which the wheel takes along (`python -m kvferry libdir`).
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
define clibs
@rm -rf python/kvferry/lib
$(call part,building the C libraries ($(1)),$(2) $(CARGO) build --profile $(1) -p kvferry-capi \
    && $(2) crates/kvferry-capi/package '$(BUILD_DIR)/$(1)/libkvferry_capi.so' python/kvferry/lib $(VERSION))
endef

# A wheel of an earlier build is not left beside the new one: `e2e/run` and people take what is there.
wheel: $(VENV)/.build-tools
	@rm -f target/wheels/kvferry-*.whl
	$(call clibs,release)
	$(call part,building the wheel,$(BIN)/maturin build --release --quiet --interpreter $(BIN)/python --out target/wheels)
	@$(BIN)/pip install --quiet --force-reinstall --no-deps target/wheels/kvferry-*.whl
	@ls target/wheels/kvferry-*.whl

$(VENV)/.dist-tools: $(VENV)/.made pyproject.toml
	$(BIN)/pip install --quiet --group dist
	touch $@

# The linker of Rust programs on this machine, and the C compiler.
ZIG_LINKS = KVFERRY_LINKER=zig PATH='$(abspath $(BIN))':"$$PATH" CC='$(abspath crates/kvferry-capi/zig-cc)' \
    CARGO_TARGET_$(shell rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')_LINKER='$(abspath crates/kvferry-capi/zig-cc)'

# Zig links against glibc 2.17; auditwheel confirms it. target/wheels keeps the wheel for this machine.
wheel-published: $(VENV)/.dist-tools
	@rm -f target/dist/kvferry-*.whl
	$(call clibs,dist,$(ZIG_LINKS))
	$(call part,building the wheel to publish,PATH='$(abspath $(BIN))':"$$PATH" $(BIN)/maturin build --profile dist --zig \
	    --compatibility manylinux_2_17 --compression-level 9 --quiet --interpreter $(BIN)/python --out target/dist)
	@$(BIN)/auditwheel show target/dist/kvferry-*.whl | tee /dev/stderr | grep '^"manylinux_2_17' >/dev/null

wheel-dist: wheel-published ## Build the wheel to publish, for manylinux_2_17: target/dist
	$(call part,compressing it again,$(BIN)/python crates/kvferry-python/recompress target/dist/kvferry-*.whl)
	@test "$$(stat -c %s target/dist/kvferry-*.whl)" -le $(WHEEL_BYTES_MAX) || \
	    { echo 'the wheel exceeds $(WHEEL_BYTES_MAX) bytes'; exit 1; }

# What is measured is what is published.
wheel-measured: wheel-published
	@$(BIN)/pip install --quiet --force-reinstall --no-deps target/dist/kvferry-*.whl

ifdef VLLM
demo: wheel
	e2e/demo $(if $(STORE),--store) $(DEMO_ARGS)
else ifdef STORE
demo: command
	target/release/kvferry demo store $(DEMO_ARGS)
else
demo: command ## Hand requests from prefill to decode engines, verify every token, draw target/demo.html (VLLM=1: real vLLM; STORE=1: KV on disk; or both)
	target/release/kvferry demo $(if $(filter --plot%,$(DEMO_ARGS)),,--plot target/demo.html) $(DEMO_ARGS)
endif

# Most tests wait for most of their time, and the models are compiled into a folder of their own.
test: ## Run the tests: Rust, documentation, models of the synchronisation, Python
	+@MAKE='$(MAKE)' .ci/parts test-tools+test-build test-docs loom+test-python+test-rust

# What takes long before the first test runs. The libraries of the Python module and the C ABI are compiled with the tests, so
# that everything below them is compiled once.
test-build:
	$(call part,compiling the tests,$(CARGO) build --workspace --lib --bins --tests)

# While the tests are compiled.
test-tools:
	$(call part,fetching what the Python tests need,$(MAKE) --no-print-directory $(VENV)/.test-tools)

# The wheel of the tests' build. `make wheel` installs the one that users get.
test-wheel: test-build $(VENV)/.test-tools
	$(call part,packing the wheel for the tests,rm -rf python/kvferry/lib \
	    && crates/kvferry-capi/package '$(BUILD_DIR)/debug/libkvferry_capi.so' python/kvferry/lib $(VERSION) \
	    && $(BIN)/python crates/kvferry-python/wheel '$(BUILD_DIR)/debug/lib_kvferry.so' target/test-wheel \
	    && cp -f '$(BUILD_DIR)/debug/libkvferry_fakecuda.so' target/test-wheel/ \
	    && $(BIN)/pip install --quiet --force-reinstall --no-deps target/test-wheel/kvferry-*.whl)

# After nextest: shows which tests found nothing to run on, and keeps nextest's exit status.
SKIPPED_ALSO = status=$$?; .ci/skipped target/nextest/default/junit.xml; (exit $$status)

# Six tests more at a time than there are cores: many wait for most of their time.
test-rust:
	$(call part,Rust tests,if $(CARGO) nextest --version >/dev/null 2>&1; \
	then $(CARGO) nextest run --workspace --no-fail-fast --test-threads $$(($$(nproc) + 6)); $(SKIPPED_ALSO); else $(CARGO) test --workspace --no-fail-fast --lib --bins --tests; fi)
	@echo 'SKIPPED here, run by `make test-slow`: soaks, full meshes, sweeps and quick benches (#[ignore = "slow: ..."])'

# The tests marked `#[ignore = "slow: make test-slow"]`, and `slow` in Python: each takes 10 s or more, or all cores.
test-slow: test-wheel ## Run the slow tests that make test skips: soaks, full meshes, sweeps, quick benches, faults at each step
	$(call part,slow Rust tests,if $(CARGO) nextest --version >/dev/null 2>&1; \
	then $(CARGO) nextest run --workspace --no-fail-fast --run-ignored only $(if $(SLOW_SKIP),-E "not test($(SLOW_SKIP))"); $(SKIPPED_ALSO); \
	else $(CARGO) test --workspace --no-fail-fast --lib --bins --tests -- --ignored $(if $(SLOW_SKIP),--skip "$(SLOW_SKIP)"); fi)
	$(if $(SLOW_SKIP),@echo 'SKIPPED: $(SLOW_SKIP): make test-slow without SLOW_SKIP runs it')
	$(call part,slow Python tests,$(BIN)/python -m pytest -m slow $(PYTEST_ARGS))

# The whole workspace, so that dependencies have the features that test-rust built them with.
test-docs:
	$(call part,Rust documentation tests,$(CARGO) test --workspace --no-fail-fast --doc)

$(VENV)/.test-tools: $(VENV)/.made pyproject.toml
	$(BIN)/pip install --quiet --group test
	touch $@

test-python: test-wheel
	$(call part,Python tests,$(BIN)/python -m pytest $(PYTEST_ARGS))

# KVFERRY_VM: a program that boots a kernel with Yama and runs a command there with the files named:
# KVFERRY_VM -f FILE... -- COMMAND
test-yama: ## Test copying within a host under Yama, in a machine that KVFERRY_VM boots
	@if [ -z "$${KVFERRY_VM:-}" ]; then echo 'SKIPPED: Yama: set KVFERRY_VM to a program that boots a kernel with it'; else \
	test=$$($(CARGO) test -p kvferry --test integration --no-run --message-format=json 2>/dev/null \
	    | sed -n 's/.*"executable":"\([^"]*integration[^"]*\)".*/\1/p' | tail -1); \
	"$$KVFERRY_VM" -f "$$test" -- sh -ec "chmod 755 /; echo 1 > /proc/sys/kernel/yama/ptrace_scope; \
	    echo user::65534:65534::/tmp:/bin/sh > /etc/passwd; name=$$(basename "$$test"); \
	    for it in \$$(\$$name --list survival::local:: | sed -n '/yama\|attach\|private_and_shared\|shared_memory/s/: test\$$//p'); do \
	    su user -c \"\$$name \$$it --exact --nocapture\"; done"; fi

# Arguments of `target/gpu/run`, such as TEST_GPU_ARGS="--only driver transfers".
TEST_GPU_ARGS ?=
HAS_CUDA = $(PYTHON) -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null

# A machine without a driver builds nothing. `make gpu-pack` builds for another machine.
test-gpu: ## Run the tests of GPUs on this machine's GPU; NOT MEASURED without one
	@if $(HAS_CUDA); then $(MAKE) --no-print-directory gpu-pack && PYTHON='$(PYTHON)' target/gpu/run --out target/gpu-results $(TEST_GPU_ARGS); \
	else echo 'NOT MEASURED: there is no CUDA driver (libcuda.so.1) here; make gpu-pack builds target/gpu for a machine with one'; fi

gpu-pack: wheel-published ## Build target/gpu: the tests of GPUs for a machine with one, started by target/gpu/run
	$(call part,packing the tests of GPUs,CARGO='$(CARGO)' e2e/gpu/pack target/dist/kvferry-*.whl)

soak: ## Every fault again and again for SOAK_SECONDS, half of it over each transport; counters back to zero, no growth
	$(call part,soak of $(SOAK_SECONDS) s,SOAK_SECONDS=$(SOAK_SECONDS) $(CARGO) test -p kvferry --test integration endurance::soak:: -- --ignored --nocapture)

e2e: build ## Run real vLLM, prefill and decode, on kvferry (builds its environment in the cache first)
	$(call part,end to end,e2e/run $(E2E_ARGS))

e2e-gpu: test-wheel build ## Run vLLM's engine core, its KV in memory of GPUs on the fake driver, on kvferry
	$(call part,engine core on the fake driver,e2e/run --connector kvferry --parts core-gpu)

e2e-long: build ## The longer checks on real vLLM: other models, a queue of two minutes, a soak, two models restarted in turns
	$(call part,end to end,e2e/run --connector kvferry --parts models soak survival offload weights --queue-seconds 120 --rounds 50)

bench: command-dist wheel-measured ## Measure beside the machine's own limits
	target/dist/kvferry bench transfers $(BENCH_ARGS)

bench-file: command-dist ## Measure memory to files beside fio (apt-get install fio); fails if it is slower
	target/dist/kvferry bench file --check $(BENCH_FILE_ARGS)

bench-file-peers: command-dist ## The same beside NIXL, too (installs it in the cache first)
	$(call part,files side by side,bench/peers/run file $(BENCH_FILE_ARGS))

bench-store: command-dist ## Measure the store beside the file transport, and the index; fails if it is slower
	target/dist/kvferry bench store --check $(BENCH_STORE_ARGS)

# BENCH_STORE_ARGS="--folder FOLDER --trace FILE"
bench-store-peers: wheel-measured ## Measure the store beside vLLM's fs tier and LMCache (installs them in the cache first)
	$(call part,stores side by side,bench/store/run --wheel target/dist/kvferry-*.whl $(BENCH_STORE_ARGS))

bench-handoff: command-dist ## Measure what handoffs cost beyond moving their bytes; fails if it is too much
	target/dist/kvferry bench handoff $(BENCH_HANDOFF_ARGS)

bench-nixl: wheel-measured ## Measure kvferry's nixl beside NIXL, through Python; fails if it is behind in a cell
	$(call part,nixl side by side,bench/peers/run nixl --check --wheel target/dist/kvferry-*.whl $(BENCH_ARGS))

bench-peers: command-dist wheel-measured ## Measure beside Mooncake and NIXL (installs them in the cache first)
	$(call part,side by side,bench/peers/run $(BENCH_ARGS))

bench-vllm: command-dist wheel-measured ## Measure KVFerryConnector beside MooncakeConnector and NixlConnector, on real vLLM
	$(call part,real vLLM side by side,bench/vllm/run --wheel target/dist/kvferry-*.whl $(BENCH_ARGS))

bench-scheduler: wheel-measured ## Measure what an engine's scheduler waits for, such as the name of a prompt; fails if it is too long
	PYTHON=$(BIN)/python bench/scheduler/run --check $(BENCH_ARGS)

bench-idle: command-dist wheel-measured ## Measure processor time and wake-ups of processes with nothing to do; fails above 0.02 % of a core
	@$(BIN)/pip install --quiet 'numpy>=1.26,<3'
	$(call part,processes with nothing to do,short=0; target/dist/kvferry bench idle --check $(BENCH_ARGS) || short=1; \
	    PYTHON=$(BIN)/python bench/idle/run --check $(BENCH_ARGS) || short=1; exit $$short)

# Where nvcc is installed, the kernels of bench/gpu/copy.cu are measured, too.
bench-gpu: command-dist ## Measure copies of a GPU's memory beside the driver's own; says NOT MEASURED without a GPU
	@if command -v nvcc >/dev/null; then nvcc -ptx -O3 -arch=native -o target/copy.ptx bench/gpu/copy.cu; else rm -f target/copy.ptx; fi
	target/dist/kvferry bench gpu --check $$(test -e target/copy.ptx && echo --kernel target/copy.ptx) $(BENCH_GPU_ARGS)

# BENCH_OFFLOAD_ARGS="--rows soak" runs the soak of 1 000 requests, "--trace FILE" takes prompts from a trace.
bench-offload: command-dist wheel-measured ## Measure KV that outlives the engine: block manager, KVFerryTier, real vLLM; fails if it falls short
	$(call part,offloading,short=0; target/dist/kvferry bench offload --check || short=1; \
	    bench/store/run --store kvferry-tier --wheel target/dist/kvferry-*.whl || short=1; \
	    bench/offload/run --wheel target/dist/kvferry-*.whl $(BENCH_OFFLOAD_ARGS) || short=1; exit $$short)

bench-sglang: wheel-measured ## Measure KVFerryStorage beside kvferry's store and SGLang's file back-end (installs SGLang in the cache first)
	$(call part,storage for SGLang side by side,bench/sglang/run --wheel target/dist/kvferry-*.whl $(BENCH_ARGS))

# BEFORE is a revision, or a path of the command. BENCH_ARGS="--rounds 9".
bench-builds: ## Measure HEAD beside the build BEFORE, in the same rounds; fails if a figure is worse by more than 3 %, in three quarters of them
	$(call part,two builds side by side,PYTHON=python3 bench/builds/run $(or $(BEFORE),$(error BEFORE=revision is needed)) $(BENCH_ARGS))

# Counts instead of measuring time. `rustix_use_libc`: its system calls go through libc, where they are counted.
bench-counted: ## Count system calls, allocations and copies of fixed batches; compare with bench/counted.json
	$(call part,building what counts,RUSTFLAGS='--cfg rustix_use_libc' CARGO_TARGET_DIR=$(abspath $(BUILD_DIR))/counted \
	    CARGO_PROFILE_DIST_STRIP=false $(CARGO) build --quiet --profile dist -p kvferry-ci-bench)
	$(call part,counting,$(BUILD_DIR)/counted/dist/kvferry-ci-bench bench/counted.json $(COUNTED_ARGS))

# Without optimisation: building takes longer than running.
loom: ## Run the models of the synchronisation in every interleaving
	$(call part,models of the synchronisation,CARGO_TARGET_DIR=$(abspath $(BUILD_DIR))/loom RUSTFLAGS='--cfg loom' \
	    CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=0 $(CARGO) test --quiet -p kvferry --lib loom_)

fuzz: ## Run every fuzz target for FUZZ_SECONDS (60); needs nightly and cargo-fuzz
	$(call part,fuzzing,fuzz/run fuzz $(FUZZ_TARGETS))

fuzz-minimise: ## Put what fuzzing found out into fuzz/corpus
	fuzz/run minimise $(FUZZ_TARGETS)

fuzz-coverage: ## Say which edges of the decoders the kept corpus reaches
	fuzz/run coverage $(FUZZ_TARGETS)

# Valgrind hides the vDSO, which rustix needs unless it goes through libc, and runs one thread at a time, in turns.
VALGRIND := valgrind --fair-sched=yes --error-exitcode=99 --leak-check=no --suppressions=$(CURDIR)/.config/valgrind.supp
VALGRIND_TESTS ?= host::every_byte_lands host::reads_take_every_byte host::scattered_blocks host::misaligned_ends \
    host::nothing_lands_after host::nothing_is_read_after host::a_cancelled_transfer host::regions_come_and_go \
    host::one_bad_descriptor host::gauges_return slow::every_byte_lands slow::a_failing_device
valgrind: ## Run transport tests under valgrind's memcheck
	@if ! command -v valgrind >/dev/null; then echo 'SKIPPED: valgrind is not here (apt-get install valgrind)'; exit 0; fi; \
	export CARGO_TARGET_DIR=$(abspath $(BUILD_DIR))/valgrind RUSTFLAGS='--cfg rustix_use_libc'; \
	$(CARGO) test --config "target.'cfg(unix)'.runner='$(VALGRIND)'" -p kvferry -p kvferry-mooncake --test integration -- --test-threads=1 \
	    $(addprefix conformance::tcp::,$(VALGRIND_TESTS)) $(addprefix conformance::local::,$(VALGRIND_TESTS)) \
	    $(addprefix conformance::mooncake::,$(filter host::%,$(VALGRIND_TESTS)))

# Without rebuilding the standard library, whose sources a toolchain may lack: its own accesses are not looked at, except
# through the functions of C that the sanitizer replaces.
ASAN_TESTS ?= conformance::tcp:: conformance::mooncake::
asan: ## Run transport tests under AddressSanitizer; needs nightly
	@if ! $(CARGO) +nightly --version >/dev/null 2>&1; then \
	    echo 'SKIPPED: AddressSanitizer needs a nightly toolchain (rustup toolchain install nightly)'; exit 0; fi; \
	if $(CARGO) +nightly miri --version >/dev/null 2>&1; then echo 'Miri is here: cargo +nightly miri test -p kvferry-proto'; \
	else echo 'Miri is not here: unsafe code is looked at by AddressSanitizer, valgrind and loom only'; fi; \
	export CARGO_TARGET_DIR=$(abspath $(BUILD_DIR))/asan RUSTFLAGS='-Zsanitizer=address --cfg rustix_use_libc'; \
	host=$$(rustc -vV | sed -n 's/^host: //p'); \
	$(CARGO) +nightly test --target $$host -p kvferry -p kvferry-mooncake --lib --test integration -- \
	    --test-threads=1 memory:: $(ASAN_TESTS)

# AddressSanitizer looks at the programs only. ThreadSanitizer must see the whole library and its standard library, too:
# what it does not see orders nothing for it. It has a thread of its own, so that counting threads fails with it.
TSAN_TESTS ?= kvferry_h_does programs_linked the_example thread_sanitizer every_byte each_refusal an_offload requests_come
test-sanitizers: ## Run the C tests under AddressSanitizer and ThreadSanitizer (nightly with rust-src)
	$(call part,C tests under AddressSanitizer,$(CARGO) test -p kvferry-capi --test integration -- \
	    --include-ignored --skip rtp_llm:: address_sanitizer)
	@if ! [ -d "$$(rustc +nightly --print sysroot 2>/dev/null)/lib/rustlib/src/rust/library" ]; then \
	    echo 'SKIPPED: ThreadSanitizer needs nightly with rust-src (rustup toolchain install nightly --component rust-src)'; exit 0; fi; \
	export CARGO_TARGET_DIR=$(abspath $(BUILD_DIR))/tsan RUSTFLAGS='-Zsanitizer=thread --cfg rustix_use_libc' KVFERRY_SANITIZER=thread; \
	host=$$(rustc -vV | sed -n 's/^host: //p'); \
	$(CARGO) +nightly test -Zbuild-std --target $$host -p kvferry-capi --test integration -- \
	    --test-threads=1 $(TSAN_TESTS)

lint: ## Check formatting, style, types and dependencies of everything
	+@MAKE='$(MAKE)' .ci/parts lint-format lint-python lint-deny lint-clippy

lint-rust: lint-format lint-clippy lint-deny

lint-format:
	$(CARGO) fmt --all --check
	@# A macro declares these modules, so that `cargo fmt` does not find them.
	rustfmt --check --edition 2024 crates/kvferry/src/transport/*/*.rs

lint-clippy:
	$(CARGO) clippy --workspace --all-targets -- -D warnings

# Advisories need their database, which a machine without a way to it can't fetch.
lint-deny: $(VENV)/.lint-tools
	PATH='$(abspath $(BIN))':"$$PATH" $(CARGO) deny --log-level error check bans licenses sources
	@log=$$(mktemp); if PATH='$(abspath $(BIN))':"$$PATH" $(CARGO) deny check advisories >"$$log" 2>&1; then echo 'advisories ok'; \
	elif grep -qi 'failed to \(fetch\|open\|clone\)\|unable to \(fetch\|clone\)' "$$log"; then echo 'SKIPPED: advisories: their database could not be fetched'; \
	else cat "$$log"; rm -f "$$log"; exit 1; fi; rm -f "$$log"

$(VENV)/.lint-tools: $(VENV)/.made pyproject.toml
	$(BIN)/pip install --quiet --group lint
	touch $@

lint-python: $(VENV)/.lint-tools
	$(BIN)/ruff format --check python bench e2e
	$(BIN)/ruff check python bench e2e
	$(BIN)/mypy

doc: ## Build the Rust documentation; warnings are errors
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps

clean: ## Remove what was built here; caches outside the checkout stay
	$(CARGO) clean
	rm -rf target $(VENV) python/kvferry/lib .pytest_cache .mypy_cache .ruff_cache
	find python e2e bench -name __pycache__ -type d -prune -exec rm -rf {} +
