# One command a task, the same for people and CI. `make` alone lists them.

PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= run,dev
BIN    := $(VENV)/bin
COMMA  := ,

# One stamp for each set of extras: a second call does nothing until pyproject.toml changes.
DEV_STAMP := $(VENV)/.installed-$(subst $(COMMA),-,$(EXTRAS))
RUN_STAMP := $(VENV)/.installed-run

DEMO := build/demo

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo check links test format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(DEV_STAMP) ## make .venv with what development needs (EXTRAS=cuda,dev for NVIDIA GPUs)

demo: $(RUN_STAMP) ## run two processes above their simulation, and ask what TP16 would do
	@mkdir -p $(DEMO)
	$(BIN)/stretto compare ag-gemm --tp 2 -m 2048 -n 1024 -k 2048 --figure $(DEMO)/compare-tp2.png
	$(BIN)/stretto simulate ag-gemm --machine gb300-nvl72 --tp 16 -m 8192 -n 6288 -k 7168 \
		--figure $(DEMO)/what-if-tp16.png
	@echo 'Look at $(DEMO)/compare-tp2.png and $(DEMO)/what-if-tp16.png'

check: $(DEV_STAMP) links ## lint, formatting, types, and the walls between the folders
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: check ## check, then run the tests (PYTEST_ARGS="-k name" to choose)
	$(BIN)/pytest $(PYTEST_ARGS)

format: $(DEV_STAMP) ## sort imports, fix what can be fixed, format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean: ## remove .venv, builds and caches
	rm -rf .venv build dist src/*.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEV_STAMP): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install $(PIP_ARGS) -e '.[$(EXTRAS)]'
	@touch $@ $(if $(filter run cuda,$(subst $(COMMA), ,$(EXTRAS))),$(RUN_STAMP))

ifneq ($(DEV_STAMP),$(RUN_STAMP))
$(RUN_STAMP): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install $(PIP_ARGS) -e '.[run]'
	@touch $@
endif

# --clear, because an attempt without ensurepip leaves half an environment behind.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 names one.' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'Python lacks its venv module: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

# The folders are linked into src/stretto. If import-linter did not follow the links, every contract
# would hold for want of modules: so what it sees is held against what lies in the folders.
define SEEN_THROUGH_LINKS
import sys
from pathlib import Path

import grimp

folders = ["figures", "runtime", "schedules", "sim", "transports"]
names = {file.with_suffix("").parts for folder in folders for file in Path(folder).rglob("*.py")}
written = {".".join(("stretto", *parts)).removesuffix(".__init__") for parts in names}
graph = grimp.build_graph("stretto", include_external_packages=True, cache_dir=None)
unseen = sorted(written - graph.modules)
unlinked = [folder for folder in folders if not Path("src/stretto", folder).is_symlink()]
if unseen:
    print("import-linter does not see (is an __init__.py missing?):", *unseen, file=sys.stderr)
if unlinked:
    print("not a link in src/stretto:", *unlinked, file=sys.stderr)
if unseen or unlinked:
    sys.exit(1)
print(f"import-linter sees all {len(written)} modules of {', '.join(folders)}")
endef
export SEEN_THROUGH_LINKS

links: $(DEV_STAMP) ## check that import-linter sees the folders through their links
	@$(BIN)/python -c "$$SEEN_THROUGH_LINKS"
