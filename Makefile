# An active virtual environment is used as it is; else .venv is made, which reuses an installed torch.
PYTHON ?= python3
VENV := $(or $(VIRTUAL_ENV),.venv)
PY := $(VENV)/bin/python
QUICK ?=
SEED ?= 0
N ?= 0
CASE ?= first
ROTATION = $(if $(filter-out 0,$(N)),--rotation $(N) --seed $(SEED))
BASE ?= HEAD
KEYS ?=
SAMPLE ?= 0

.PHONY: demo test lint hopper ampere all-kernels same-sass gpu-kernels gpu-tests gpu-sanitize perf profile

$(PY):
	$(PYTHON) -m venv --system-site-packages $(VENV)

COMMA := ,

# $(call need,modules,extras,what they are): installs the extras unless the modules are there. Importing takes seconds.
define need
	@$(PY) -c "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))" torch lowbit_attn $(1) || { \
	  echo "Installing lowbit-attn[$(2)] into $(VENV): $(3); torch too if missing"; \
	  $(PY) -m pip install -q -e '.[$(2)]'; }
endef

# A passive wait keeps a busy machine from stalling the many small CPU operations of decoding.
demo: | $(PY)
	$(call need,transformers accelerate gguf matplotlib typer rich,demo,transformers and friends (about 60 MB))
	@OMP_WAIT_POLICY=PASSIVE $(PY) -m lowbit_attn.demo $(if $(filter-out 0,$(QUICK)),--quick)

# All CPU tests: those of the kernels trace and compile them, for which both DSLs must be there.
test: | $(PY)
	$(call need,pytest xdist hypothesis pytest_timeout transformers matplotlib typer rich tilelang cutlass,test$(COMMA)kernels,\
	  pytest and transformers (about 70 MB) and both tile DSLs (about 300 MB))
	$(PY) -m pytest -n auto

lint: | $(PY)
	$(call need,ruff,dev,ruff and build (about 15 MB))
	$(PY) -m ruff check .

# N=0: every kernel; else a rotating part of about N of them, which SEED picks. all-kernels: whatever the support tables promise.
hopper ampere: | $(PY)
	$(call need,tilelang cutlass typer rich,kernels,both tile DSLs (about 300 MB))
	$(PY) -m lowbit_attn.build --arch $@ $(ROTATION)

all-kernels: | $(PY)
	$(call need,tilelang cutlass typer rich,kernels,both tile DSLs (about 300 MB))
	$(PY) -m lowbit_attn.build --arch hopper --arch ampere --all $(ROTATION)

# SAMPLE=0: all kernels whose names have KEYS, else so many of them. Needs no GPU.
same-sass: | $(PY)
	$(call need,tilelang cutlass typer rich,kernels,both tile DSLs (about 300 MB))
	$(PY) perf/same_sass.py $(BASE) --keys '$(KEYS)' --sample $(SAMPLE) --seed $(SEED)

# N=0: the fast subset; else N decode calls drawn by SEED. gpu-kernels needs no GPU: build there, test where one is.
gpu-kernels: | $(PY)
	$(call need,tilelang cutlass typer rich,kernels,both tile DSLs (about 300 MB))
	PYTHONPATH=tests $(PY) -m gpu.build --seed $(SEED) --cases $(N)

gpu-tests: | $(PY)
	$(call need,typer rich,cli,typer and rich (about 3 MB))
	$(PY) perf/gpu_tests.py --seed $(SEED) --cases $(N)

gpu-sanitize: | $(PY)
	$(call need,typer rich,cli,typer and rich (about 3 MB))
	$(PY) perf/sanitize.py

perf: | $(PY)
	$(call need,typer rich,cli,typer and rich (about 3 MB))
	$(PY) perf/bench.py --preset $(CASE)

profile: | $(PY)
	$(call need,typer rich,cli,typer and rich (about 3 MB))
	$(PY) perf/nsight.py $(if $(filter first,$(CASE)),targets:4,$(CASE))
