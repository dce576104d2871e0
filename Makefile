# Everything is set up in .venv on first use, from Python >= 3.10 and (for the C++ kernels) a C++ compiler.
#   make test PYTHON=python3.12     another Python: its torch >= 2.11 is reused if it has one
#   make test TORCH="torch==2.11.0"     the torch to install otherwise
#   make test ARGS="-k gelu -x"     further arguments for the target's command
#   make CUDAARCHS=90-real ...      CUDA kernels for these architectures, even without a GPU

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-all bench docs lint format info clean

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIN := -c $(VENV)/constraints.txt
CXX_FILES = $(foreach folder,csrc csrc/autograd csrc/hfrecord,$(addprefix $(folder)/*.,h cpp cu cuh)) \
  $(shell find csrc/hfreduce -name "*.h" -o -name "*.cpp" -o -name "*.cu" -o -name "*.cuh")

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(VENV)/.built ## .venv, torch, hfnn in place; every other target does it first

demo: setup ## examples/train_gpt.py: train a small GPT, plain and converted, and compare
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Plugins of a Python that lends its torch are not loaded. One thread per worker, or the workers compete for the cores.
# Bytecode is written: hundreds of processes import the same files.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest \
  -p xdist -p timeout -p hypothesispytest -n $(WORKERS) --dist worksteal --timeout 600

test: setup ## tests without slow ones: all pairs of parameters instead of all combinations
	$(PYTEST) -m "not slow and not rest" $(ARGS)

test-all: setup $(VENV)/.traces ## all tests, with a new interpreter for every rank
	FRESH_RANKS=1 $(PYTEST) $(ARGS)

bench: setup ## the benchmark: this machine's kernels against torch
	$(BIN)/python bench/run.py $(ARGS)

lint: $(VENV)/.lint $(VENV)/.built ## check with ruff, clang-format and basedpyright, without changes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(wildcard $(CXX_FILES))
	$(BIN)/python tests/test_types.py check

format: $(VENV)/.lint ## format with ruff and clang-format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(wildcard $(CXX_FILES))

info: setup ## what hfnn can do on this machine, and why not more
	$(BIN)/python -m hfnn.info

docs: $(VENV)/.docs ## the site, in out/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

clean: ## remove the build, caches and .venv
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# A .pth file lends the torch of $(PYTHON), which may itself be a virtual environment (--system-site-packages would skip
# it). Without such a torch nothing is lent, so packages of the machine cannot interfere. The setuptools that Python
# 3.10 and 3.11 install into a new environment is older than torch requires, and would hide a newer one.
$(VENV)/.python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), f"hfnn needs Python >= 3.10, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) \
	  || { echo "cannot make $(VENV): install python3-venv, or set PYTHON"; exit 1; }
	$(PIP) uninstall --quiet --yes setuptools
	lent=$$($(PYTHON) -c 'import torch, pathlib; assert torch.__version__ >= "2.11"; \
	  print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null) \
	  && echo "$$lent" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth" || true
	touch $@

# Pins torch and Triton as found, so that no later install replaces them: they are large.
$(VENV)/constraints.txt: $(VENV)/.python
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install "$(TRITON); platform_system == 'Linux'"
	$(BIN)/python -c 'from importlib.metadata import packages_distributions as found, version; \
	  print(*(f"{name}=={version(name)}" for name in ("torch", "triton") if name in found()), sep="\n")' > $@

# Build requirements: the backend named in pyproject.toml, and cmake and ninja if the machine's are missing or too old.
$(VENV)/.tools: $(VENV)/constraints.txt pyproject.toml
	$(PIP) install --quiet $$(sed -n 's/^requires = //p' pyproject.toml | tr -d '[]",')
	$(PIP) install --quiet pip $$($(BIN)/python -c 'import scikit_build_core.build as b; print(*b.get_requires_for_build_wheel())')
	touch $@

# Requested CUDA kernels are built, whatever was built before. Without a request, existing ones stay.
ifneq ($(CUDAARCHS),)
ifneq ($(CUDAARCHS),$(shell cat $(VENV)/.cudaarchs 2>/dev/null))
.PHONY: $(VENV)/.built
endif
endif

# In place: Python files are live, and the build folder is kept, so that only changed C++ is compiled again.
$(VENV)/.built: $(VENV)/.tools CMakeLists.txt $(shell find csrc)
	$(PIP) install --quiet --no-build-isolation $(PIN) -e '.[examples,test,tools]'
	$(if $(CUDAARCHS),echo '$(CUDAARCHS)' > $(VENV)/.cudaarchs)
	touch $@

$(VENV)/.traces: $(VENV)/.built
	$(PIP) install --quiet $(PIN) $$(sed -n 's/^traces = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d '",')
	touch $@

$(VENV)/.docs: $(VENV)/.built
	$(PIP) install --quiet $(PIN) $$(sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d '",')
	touch $@

# Installed into .venv even if $(PYTHON) lends them, for their commands.
$(VENV)/.lint: $(VENV)/.python pyproject.toml
	$(PIP) install --quiet --ignore-installed $$(sed -n 's/^lint = //p' pyproject.toml | tr -d '[]",')
	touch $@
