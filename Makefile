# The front door: `make` alone lists what there is. ARGS is passed on, e.g. make test ARGS='-k udp'.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-quick e2e lint format bench-quick clean wheel bpffs

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# What needs root is run through sudo by others than root; without sudo the command says what it lacks.
SUDO  := $(shell [ "$$(id -u)" = 0 ] || command -v sudo)
# The header shim copies the kernel's own text, so it keeps the kernel's own shape.
C_FILES = $(shell find bpf ebpflb tests -path bpf/include -prune -o -name '*.[ch]' -print)
ARGS  ?=

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## everything installed; .venv/bin/ebpflb is ready to run

$(STAMP): constraints.txt setup.cfg pyproject.toml scripts/setup.sh
	@scripts/setup.sh
	@touch $@

bpffs: $(STAMP)
	@scripts/setup.sh bpffs

demo: $(STAMP) bpffs ## a small cluster of namespaces on this machine, and what the maps hold
	@$(SUDO) $(BIN)/ebpflb demo $(ARGS)

test: $(STAMP) bpffs lint ## lint and every test (without root or Go: those that can do without)
	@echo "[test] every test, in random order"
	@$(BIN)/pytest $(ARGS)

test-full: export EBPFLB_TEST_FULL := 1
test-full: test ## the same, with as many changes and as much patience as CI has no time for

e2e: $(STAMP) bpffs ## only the tests on a real API server, which is built first (root, Go)
	@echo "[e2e] kube-apiserver, etcd and kube-controller-manager, built once and kept"
	@$(BIN)/pytest tests/e2e $(ARGS)

test-quick: $(STAMP) ## unit and property tests: no root, seconds
	@$(BIN)/pytest tests/unit tests/property $(ARGS)

lint: $(STAMP) ## ruff, mypy, the import rules, clang-format
	@echo "[lint] ruff check"
	@$(BIN)/ruff check --quiet
	@echo "[lint] ruff format --check"
	@$(BIN)/ruff format --check --quiet
	@echo "[lint] mypy"
	@$(BIN)/mypy --no-error-summary
	@echo "[lint] lint-imports"
	@out=$$($(BIN)/lint-imports --no-logo pyproject.toml) || { echo "$$out"; exit 1; }
	@echo "[lint] clang-format"
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)

format: $(STAMP) ## put Python and C into shape
	@$(BIN)/ruff check --quiet --fix-only
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(C_FILES)

bench-quick: $(STAMP) bpffs ## the comparison with iptables mode, short form
	@$(SUDO) $(BIN)/ebpflb bench --quick $(ARGS)

wheel: $(STAMP) ## sdist and wheel into dist/
	@$(BIN)/python -m build --no-isolation

clean: ## remove what building, testing and the tools left (the venv stays)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find bpf ebpflb tests -name __pycache__ -type d -prune -exec rm -rf {} +
