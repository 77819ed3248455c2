# SPDX-License-Identifier: Apache-2.0
#
#   make demo     set up, run the reference model through convt3d, compare with float64, save a picture
#   make test     set up, build everything, run ctest and pytest
#
# Where pip, or as root apt-get, brings what is missing: README.md.
# Both make their own environment in .venv. With PYTHON=<python> they use one that is there already and install
# nothing: for machines without a network. `make help` lists the rest.

# Recipes use the shell's PYTHON below; an environment variable counts too.
ifeq ($(origin PYTHON),undefined)
  PYTHON := $(CURDIR)/.venv/bin/python
  OWN_ENV := 1
else
  PYTHON := $(or $(shell command -v $(PYTHON)),$(error PYTHON=$(PYTHON) does not exist))
endif
BUILD_DIR := build/native
export PYTHON
# ninja, cmake and ctest from the same environment, where it has them.
export PATH := $(dir $(PYTHON)):$(PATH)

# $(call setup,<parts>): nothing in a given environment.
setup = $(if $(OWN_ENV),scripts/setup_env.sh $(1),true)

# The shared file of the driver is there before nvidia-smi is, in containers.
HAS_GPU := $(shell [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; [ $$? -eq 0 ] && echo 1)

IN_TREE := PYTHONPATH=$(CURDIR)/python$${PYTHONPATH:+:$$PYTHONPATH}

.PHONY: help demo test test-cpp test-host test-python build lint format docs wheel release bench clean
help:
	@sed -n '/^#   make/s/^# //p' Makefile
	@echo '   make build    the CUDA libraries, into python/convt3d/_lib (needs a CUDA compiler: set up if there is none)'
	@echo '   make lint     ruff, mypy, clang-format;  make format: apply what they can'
	@echo '   make docs     the documentation site, into build/site; warnings are errors'
	@echo '   make wheel    dist/convt3d-*.whl'
	@echo '   make release  wheel and source archive, checked with twine and auditwheel'
	@echo '   make bench    the benchmarks (GPU); BENCH="--rows reference" and the like: docs/benchmarks.md'
	@echo '   make clean    removes build/, dist/ and built libraries, never .venv'

# A GPU that torch cannot use (a CPU build of torch, an old driver) is said, and everything runs on the CPU.
ifdef HAS_GPU
demo:
	@$(call setup,runtime)
	@if $(PYTHON) scripts/gpu_torch.py; then \
	   $(call setup,build cutlass cuda) && \
	   echo "demo: NVIDIA GPU found; building the CUDA library first (minutes the first time)" && \
	   scripts/build_native.sh -DCONVT3D_BUILD_TESTS=OFF; \
	 else \
	   echo "demo: the CUDA library is not built, everything runs on the CPU (reduced batch)"; \
	 fi
	@$(PYTHON) -c 'import torch' 2>/dev/null || { echo "demo: $(PYTHON) has no torch: README.md says what it needs" >&2; exit 2; }
	@$(IN_TREE) $(PYTHON) -m convt3d demo
else
demo:
	@$(call setup,runtime)
	@echo "demo: no NVIDIA GPU on this machine: the CUDA library is not built, everything runs on the CPU (reduced batch)"
	@$(PYTHON) -c 'import torch' 2>/dev/null || { echo "demo: $(PYTHON) has no torch: README.md says what it needs" >&2; exit 2; }
	@$(IN_TREE) $(PYTHON) -m convt3d demo
endif

build:
	@$(call setup,test cutlass cuda build)
	@scripts/build_native.sh -DCONVT3D_BUILD_TESTS=OFF

# In an own environment the CUDA library can always be built, so its tests must not be skipped. Without GoogleTest
# the Python tests still run, and the status still says that something is missing. The log's last lines are the verdict.
test:
	@$(call setup,test cutlass cuda build)
	@$(if $(HAS_GPU),$(PYTHON) scripts/gpu_torch.py || echo "test: tests that need torch's CUDA are skipped", \
	   echo "test: no NVIDIA GPU on this machine: tests that need one are built but skipped")
	@status=0; cpp=ON; verdict=; \
	 heading() { printf '\n==== %s\n' "$$1"; }; \
	 verdict() { [ $$2 -eq 0 ] && word=passed || { word=FAILED; status=1; }; verdict="$$verdict, $$1 $$word"; }; \
	 heading "build"; \
	 scripts/setup_env.sh $(if $(OWN_ENV),gtest,has-gtest) || { status=1; cpp=OFF; }; \
	 scripts/build_native.sh -DCONVT3D_BUILD_TESTS=$$cpp || { echo "test: the build FAILED"; exit 1; }; \
	 if [ $$cpp = ON ]; then \
	   heading "C++ tests"; $(TEST_CPP); verdict "C++ tests" $$?; \
	   heading "host code under sanitizers"; { $(TEST_HOST); }; verdict "host code under sanitizers" $$?; \
	 fi; \
	 heading "Python tests"; $(TEST_PYTHON); verdict "Python tests" $$?; \
	 heading "verdict"; echo "test: $${verdict#, }"; \
	 [ $$cpp = ON ] || echo "test: the C++ tests were NOT built: GoogleTest is missing, see above"; \
	 [ $$status -eq 0 ] && echo "test: everything passed" || echo "test: FAILED"; \
	 exit $$status

# The parts of `test`: on what is built already, and the host code alone (no CUDA, no torch) under sanitizers.
TEST_CPP = ctest --test-dir $(BUILD_DIR) --output-on-failure
TEST_HOST = cmake -S . -B build/host -DCONVT3D_CUDA=OFF -DCONVT3D_SANITIZE=address,undefined --log-level=WARNING && \
  MAKEFLAGS= cmake --build build/host --parallel $${JOBS:-$$(nproc)} && \
  ctest --test-dir build/host --output-on-failure --progress --parallel 2
# A given environment need not have coverage. What it must reach is in pyproject.toml.
TEST_PYTHON = $(if $(OWN_ENV),CONVT3D_REQUIRE_LIBRARY=1) $(IN_TREE) $(PYTHON) -m $(if $(OWN_ENV),coverage run -m) pytest \
  $(if $(OWN_ENV),&& $(PYTHON) -m coverage report)
test-cpp:
	@$(TEST_CPP)
test-host:
	@$(TEST_HOST)
test-python:
	@$(TEST_PYTHON)

# Not what git knows: without git, or in an unpacked archive, an empty list would pass.
CXX_FILES = $(shell find cutlass_kernels python/csrc tests benchmarks -name '*.[ch]pp' -o -name '*.h' -o -name '*.cu' \
  -o -name '*.cuh')
lint:
	@$(call setup,test lint)
	@status=0; \
	 $(PYTHON) -m ruff check . || status=1; \
	 $(PYTHON) -m ruff format --check . || status=1; \
	 $(PYTHON) -m mypy || status=1; \
	 clang-format --dry-run -Werror $(or $(CXX_FILES),$(error lint: no C++ sources found)) || status=1; \
	 [ $$status -ne 0 ] || echo "lint: ruff, mypy and clang-format have nothing to say"; exit $$status
format:
	@$(call setup,test lint)
	@$(PYTHON) -m ruff check --fix --quiet . ; $(PYTHON) -m ruff format .
	@clang-format -i $(CXX_FILES)

# The API pages come from the sources; nothing is imported.
docs:
	@$(call setup,lint docs)
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet && echo "docs: build/site/index.html"

wheel:
	@$(call setup,test cutlass cuda build)
	@rm -f dist/convt3d-*.whl  # one of another kind would be installed, checked and uploaded with it
	@$(PYTHON) -m pip wheel . --no-deps --no-build-isolation --wheel-dir dist

# The wheel and the source archive in dist/, looked over; docs/releasing.md has the rest.
release: wheel
	@$(call setup,release)
	@rm -f dist/convt3d-*.tar.gz
	@$(PYTHON) -c 'import sys; sys.path.insert(0, "scripts"); import build_backend; build_backend.build_sdist("dist")' >/dev/null
	@$(PYTHON) -m twine check --strict dist/*
	@for wheel in dist/*-manylinux*.whl; do $(PYTHON) -m auditwheel show $$wheel || exit 1; done
	@for file in dist/*; do scripts/try_install.sh $(PYTHON) $$file || exit 1; done
	@ls -l dist

bench:
	@$(if $(HAS_GPU),,echo "bench: no NVIDIA GPU on this machine: nothing to measure" >&2; exit 2)
	@$(call setup,runtime build cutlass cuda)
	@$(PYTHON) scripts/gpu_torch.py >&2
	@scripts/build_native.sh -DCONVT3D_BUILD_TESTS=OFF
	@$(IN_TREE) $(PYTHON) benchmarks/run.py $(BENCH)

clean:
	rm -rf build dist python/convt3d/_lib python/*.egg-info
