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
PARTS ?= 0
RECORD ?=
ARCH ?=
# what needs transformers: its integration, the commands, the examples and the documented code
HF_TESTS = $(shell grep -rlE 'importorskip..transformers|import transformers|CACHE_ARGUMENT' tests --include='test_*.py')

.PHONY: demo test test-hf-old test-eval lint hopper ampere all-kernels kernel-wheel same-sass mutants gpu-kernels gpu-tests gpu-sanitize perf profile

$(PY):
	$(PYTHON) -m venv --system-site-packages $(VENV)

COMMA := ,

# What builds kernels, as names for "need", and in words
DSLS := tilelang cutlass :nvcc :nvdisasm :cuobjdump
COMPILERS := both tile DSLs and nvcc (about 400 MB)

# $(call need,names,extras,what they are): installs the extras unless the names are there: modules, which importing would
# take seconds, and :programs, wherever toolchain.py finds them. -P: the folder build/ is not the module build.
define need
	@$(PY) -P -c "import runpy, sys, importlib.util as u; find = runpy.run_path('src/lowbit_attn/toolchain.py')['find_tool']; \
	  sys.exit(not all(find(n[1:]) if n[0] == ':' else u.find_spec(n) for n in sys.argv[1:]))" \
	  torch lowbit_attn $(1) 2> /dev/null || { \
	  echo "Installing lowbit-attn[$(2)] into $(VENV): $(3); torch too if missing"; \
	  $(PY) -m pip install -q -e '.[$(2)]'; }
endef

# A passive wait keeps a busy machine from stalling the many small CPU operations of decoding.
demo: | $(PY)
	$(call need,transformers accelerate gguf matplotlib typer rich,demo,transformers and friends (about 75 MB))
	@OMP_WAIT_POLICY=PASSIVE $(PY) -m lowbit_attn.demo $(if $(filter-out 0,$(QUICK)),--quick)

# All CPU tests. Those of the kernels trace and compile them, so that the compilers must be there. PARTS=P: of as many cases
# of the PTX interpreter, which take half of the time, one is run, which SEED picks.
test: | $(PY)
	$(call need,pytest xdist hypothesis pytest_timeout transformers matplotlib typer rich build $(DSLS),test$(COMMA)kernels,\
	  pytest and transformers (about 75 MB) and $(COMPILERS))
	$(PY) -m pytest -n auto $(if $(filter-out 0,$(PARTS)),--parts $(PARTS) --seed $(SEED))

# The tests of transformers with one from before its argument "cache", in an environment that takes all else from VENV.
OLD := build/hf-old
test-hf-old: | $(PY)
	$(call need,pytest xdist hypothesis pytest_timeout transformers matplotlib typer rich,test,pytest and transformers (about 75 MB))
	$(PY) -m venv $(OLD)
	$(PY) -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_paths()[\"purelib\"]!r})')" \
	  > $$(echo $(OLD)/lib/python*/site-packages)/parent.pth
	@echo "Installing transformers before 5.21 into $(OLD) (about 15 MB)"
	$(OLD)/bin/python -m pip install -q 'transformers>=5.17,<5.21'
	$(OLD)/bin/python -c "import transformers as t; assert t.__version__ < '5.21', t.__version__; print(t.__version__)"
	$(OLD)/bin/python -m pytest -n auto $(HF_TESTS)

# The tests of lm-eval's model type, whose data sets' libraries no other test needs.
test-eval: | $(PY)
	$(call need,lm_eval pytest xdist hypothesis pytest_timeout transformers matplotlib typer rich,eval$(COMMA)test,\
	  lm-eval$(COMMA) pytest and transformers)
	$(PY) -m pytest -n auto $(shell grep -rl 'importorskip..lm_eval' tests --include='test_*.py')

lint: | $(PY)
	$(call need,ruff,dev,ruff and build (about 15 MB))
	$(PY) -m ruff check .

# N=0: every kernel; else a rotating part of about N of them, which SEED picks. all-kernels: whatever the support tables promise;
# RECORD=FILE: what was built is noted there, and passed over by the next run, here or elsewhere.
hopper ampere: | $(PY)
	$(call need,$(DSLS) typer rich,kernels,$(COMPILERS))
	$(PY) -m lowbit_attn.build --arch $@ $(ROTATION)

all-kernels: | $(PY)
	$(call need,$(DSLS) typer rich,kernels,$(COMPILERS))
	$(PY) -m lowbit_attn.build --arch hopper --arch ampere --all $(ROTATION) $(if $(RECORD),--record $(RECORD))

# A wheel of an architecture's shipped kernels, with which nobody who installs it needs a compiler. N: of a part of them.
kernel-wheel: | $(PY)
	$(if $(filter hopper ampere,$(ARCH)),,$(error ARCH: got '$(ARCH)', supported: hopper, ampere))
	$(call need,$(DSLS) typer rich build,kernels$(COMMA)dev,$(COMPILERS))
	$(PY) -m lowbit_attn.build --arch $(ARCH) $(ROTATION)
	$(PY) -m lowbit_attn.kernel_wheel --arch $(ARCH) --out dist $(ROTATION)

# SAMPLE=0: all kernels whose names have KEYS, else so many of them. Needs no GPU.
same-sass: | $(PY)
	$(call need,$(DSLS) typer rich,kernels,$(COMPILERS))
	$(PY) perf/same_sass.py $(BASE) --keys '$(KEYS)' --sample $(SAMPLE) --seed $(SEED)

# One deliberate fault at a time in the kernels, and the test that should see it: an hour, in a copy of the tree.
mutants: | $(PY)
	$(call need,pytest xdist hypothesis pytest_timeout typer $(DSLS),test$(COMMA)kernels,pytest and $(COMPILERS))
	$(PY) perf/mutants.py

# N=0: the fast subset; else N decode calls drawn by SEED. gpu-kernels needs no GPU: build there, test where one is.
gpu-kernels: | $(PY)
	$(call need,$(DSLS) typer rich,kernels,$(COMPILERS))
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
