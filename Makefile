# make test      builds the package and passes the tests
# make sanitize  those of the tests that look for memory errors and races in the stages, on the CPU (make test does too)
# make bench     builds it and prints the ladder (ARGS="8192 --reps 10" for ladder.py)
# make ladder-diff N=6   what stage 6 (or 9b ...) changes against its parent
# make lint      checks the formatting
# make wheel     a wheel for every supported GPU architecture, in dist/
# make gpu       on a machine with a GPU: tests, sanitizers, benchmarks, and the results files anew
#                (its parts: gpu-test, gpu-sanitize, gpu-bench)
# make sweeps SWEEPS=DIR   compiles the variants of the stages that gpu-bench measures, for a machine without nvcc
#
# All of them first make .venv with torch and the tools in it. With PYTHON=python3 that interpreter and what it has
# installed are used instead, and nothing is fetched; a torch_sgemm installed there is used as it is.

BASE_PYTHON ?= python3
SANITIZERS ?= memcheck racecheck synccheck
ARCHS := $(shell sed -n 's/^ALL_ARCHS = "\(.*\)"/\1/p' setup.py)

ifdef PYTHON
export PYTHONPATH := $(if $(PYTHONPATH),$(PYTHONPATH):)$(CURDIR)
ENVIRONMENT :=
INSTALLED = cd / && $(PYTHON) -c 'import torch_sgemm' 2>/dev/null
else
PYTHON := $(CURDIR)/.venv/bin/python
ENVIRONMENT := .venv/.complete
INSTALLED = false
endif

.PHONY: test sanitize bench ladder-diff lint build wheel gpu gpu-test gpu-sanitize gpu-bench need-gpu sweeps clean help

test: build
	cd tests && $(PYTHON) -m pytest $(ARGS)

sanitize: build
	cd tests && $(PYTHON) -m pytest test_sanitize.py $(ARGS)

bench: build
	$(PYTHON) benchmarks/ladder.py $(ARGS)

# Needs no build, and of Python no more than itself.
ladder-diff:
	@$(BASE_PYTHON) benchmarks/ladder_diff.py $(N)

build: $(ENVIRONMENT)
	@command -v $(CXX) >/dev/null || { echo "There is no C++ compiler '$(CXX)': install g++, or set CXX."; exit 1; }
	@$(INSTALLED) || { cd $(CURDIR) && $(PYTHON) setup.py -q build_ext --inplace; }

.venv/.complete: pyproject.toml
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "torch_sgemm needs Python 3.10 or newer as '$(BASE_PYTHON)': install it, or set BASE_PYTHON."; exit 1; }
	@$(BASE_PYTHON) -m venv .venv || \
	  { echo "'$(BASE_PYTHON) -m venv' failed: install python3-venv, or set BASE_PYTHON."; exit 1; }
	.venv/bin/python -m pip install -q --upgrade 'pip>=25.1'
	.venv/bin/python -m pip install -q --group dev
	.venv/bin/python -c 'import sysconfig; print("$(CURDIR)", file=open(sysconfig.get_path("purelib") + "/torch_sgemm.pth", "w"))'
	touch $@

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | PATH="$(dir $(PYTHON)):$$PATH" xargs clang-format --dry-run -Werror

wheel: $(ENVIRONMENT)
	TORCH_CUDA_ARCH_LIST='$(ARCHS)' $(PYTHON) -m pip wheel -q --no-build-isolation --no-deps -w dist .

gpu: gpu-test gpu-sanitize gpu-bench

need-gpu: build
	@$(PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || \
	  { echo "make gpu needs a machine with a CUDA GPU; torch sees none here. 'make test' and 'make bench' run without."; exit 1; }

gpu-test: need-gpu
	cd tests && $(PYTHON) -m pytest -m gpu $(ARGS)

gpu-sanitize: need-gpu
	set -e; for tool in $(SANITIZERS); do \
	  compute-sanitizer --tool $$tool --error-exitcode 9 $(PYTHON) tests/sanitize.py; done

# SWEEPS=DIR measures the variants that `make sweeps SWEEPS=DIR` compiled, where there is no nvcc.
gpu-bench: need-gpu
	$(PYTHON) benchmarks/ladder.py --save
	$(PYTHON) benchmarks/counters.py --save
	$(PYTHON) benchmarks/roofline.py
	$(PYTHON) benchmarks/launch_bounds.py --save $(SWEEPS:%=--measure %/launch_bounds)
	$(PYTHON) benchmarks/chapter9.py --save $(SWEEPS:%=--measure %/chapter9)
	$(PYTHON) benchmarks/tune.py --save $(SWEEPS:%=--measure %/tune)
	$(PYTHON) benchmarks/ablation.py --save $(SWEEPS:%=--measure %/ablation)
	$(PYTHON) benchmarks/matrix_cost.py --save $(SWEEPS:%=--measure %/matrix_cost)
	$(PYTHON) benchmarks/grid_order.py --save $(SWEEPS:%=--measure %/grid_order)
	$(PYTHON) benchmarks/sizes.py --save
	$(PYTHON) benchmarks/suite.py --save
	$(PYTHON) benchmarks/accuracy.py --save
	$(PYTHON) benchmarks/host_cost.py --save
	$(PYTHON) benchmarks/documents.py

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

sweeps: build
	$(PYTHON) benchmarks/launch_bounds.py --compile $(SWEEPS)/launch_bounds
	$(PYTHON) benchmarks/chapter9.py --compile $(SWEEPS)/chapter9
	$(PYTHON) benchmarks/tune.py --compile $(SWEEPS)/tune
	$(PYTHON) benchmarks/ablation.py --compile $(SWEEPS)/ablation
	$(PYTHON) benchmarks/matrix_cost.py --compile $(SWEEPS)/matrix_cost
	$(PYTHON) benchmarks/grid_order.py --compile $(SWEEPS)/grid_order

clean:
	rm -rf build dist *.egg-info torch_sgemm/_C*.so torch_sgemm/_build_info.py
