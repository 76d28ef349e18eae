# Every target makes the virtual environment it needs by itself, once, and brings it up to date when pyproject.toml,
# setup.py or its constraints change. The demonstration installs what it needs itself; everything else installs the rest.
#
#   make demo          run the demonstration (CPU, no network at run time)
#   make test          lint, then all tests; CASES=all runs every case of those that take long
#   make test-gpu      the tests that need a GPU, on the GPU of this machine
#   make lint          the linter, the formatter's check and the type checker
#   make types         the type checker alone
#   make fuzz          random cases held against model.generate for SECONDS=60, on a GPU with ARGS='--device cuda'
#   make test-ray      the tests that start a cluster of Ray's, which others skip where Ray is not installed
#   make test-oldest   all tests on the oldest supported transformers, in an environment of its own
#   make test-newest   the same on the newest torch and transformers that were tried
#   make sweep         every class of the newest transformers against model.generate, and docs/models.md anew (five minutes
#                      on two cores)
#   make sweep-oldest  the same on the oldest supported transformers, without the page
#   make kernel-page   what each kernel takes on chip on each generation of cards, and docs/kernels-by-card.md anew
#   make pictures      draw the README's pictures anew
#   make dist          a wheel and a source distribution in dist/, tried in a clean environment; nothing is published
#   make clean         remove the environments, the unpacked model and everything built or cached
#
# PYTHON=python3.12 picks the interpreter, JOBS=0 turns parallel tests off, and
# ARGS='tests/test_packaging.py -k wheel' goes to pytest. `make test-gpu` makes no environment: with PYTHON=python3 it
# runs with that interpreter and what is installed there, otherwise with .venv if there is one.

PYTHON ?= python3
# One more than two cores: many tests wait for processes that they start.
JOBS ?= 3
ARGS ?=
SECONDS ?= 60

VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_NEWEST := .venv-newest
INSTALLED := $(VENV)/.installed
INSTALLED_OLDEST := $(VENV_OLDEST)/.installed
INSTALLED_NEWEST := $(VENV_NEWEST)/.installed
# An environment with everything does for the demonstration, too.
INSTALLED_DEMO := $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(VENV)/.installed-demo)

# Nothing is asked of the model hub.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some containers set this. Tests start dozens of processes, and each of them would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-ray test-gpu fuzz lint ruff types test-oldest test-newest sweep sweep-oldest kernel-page pictures dist \
	clean
.DELETE_ON_ERROR:

demo: $(INSTALLED_DEMO)
	@$(VENV)/bin/python examples/quickstart.py

# Each test worker keeps to one core. Where a test has several threads, those that wait leave the cores to the others.
ONE_CORE := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

# Of tests that take long a part of the cases is run: all with `make test CASES=all`.
CASES := some

# The type checker takes one core for a minute, so it runs beside the tests.
test: ruff
	@($(TYPE_CHECK)) & types=$$!; \
	CASES=$(CASES) $(ONE_CORE) $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist loadgroup $(ARGS); tests=$$?; \
	wait $$types || { echo "the type checker failed: make types" >&2; exit 1; }; exit $$tests

# Where PYTHON and JOBS are not given, tests on a GPU have defaults of their own.
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(VENV)/bin/python) $(PYTHON)),$(PYTHON))
GPU_JOBS = $(if $(filter file,$(origin JOBS)),$(shell expr `getconf _NPROCESSORS_ONLN` - 2 \| 1),$(JOBS))
# These take the memory of the whole GPU, so they run after all others, alone.
GPU_MEMORY := tests/test_engine_memory_gpu.py
# No pytest-timeout or pytest-xdist may be there, whose settings and marks strict options would refuse.
# Most of the time goes into compiling kernels, of which a seventh is for line numbers that a debugger would show.
GPU_PYTEST = OMP_NUM_THREADS=1 TRITON_DISABLE_LINE_INFO=1 $(GPU_PYTHON) -m pytest -o addopts=-rs -m gpu

test-gpu:
	@for name in pytest hypothesis numpy torch transformers triton; do \
		$(GPU_PYTHON) -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$$name') is None)" \
			|| { echo "test-gpu: $(GPU_PYTHON) has no $$name"; exit 1; }; \
	done
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "test-gpu: there is no GPU here that PyTorch can use")'
	@began=`date +%s`; failed=; workers="-n $(GPU_JOBS) --dist loadgroup"; \
	$(GPU_PYTHON) -c 'import xdist' 2>/dev/null \
		|| { workers=; echo "test-gpu: $(GPU_PYTHON) has no pytest-xdist: all tests run in one process, which takes much longer"; }; \
	$(GPU_PYTEST) $$workers $(if $(ARGS),$(ARGS),$(GPU_MEMORY:%=--ignore=%)) || failed=yes; \
	test -n '$(ARGS)' || $(GPU_PYTEST) $(GPU_MEMORY) || failed=yes; \
	echo "test-gpu: took $$((`date +%s` - began)) s"; test -z "$$failed"

# With PYTHON=python3 it makes no environment, either.
fuzz: $(if $(filter file,$(origin PYTHON)),$(INSTALLED))
	@PYTHONPATH='$(CURDIR)' OMP_NUM_THREADS=1 $(GPU_PYTHON) tests/fuzz.py --seconds $(SECONDS) $(ARGS)

# The library as it is imported: /kernels and /patches are packages of it, which no type checker can guess.
TYPED := build/typed

TYPE_CHECK = rm -rf $(TYPED) && mkdir -p $(TYPED)/hf_batchllm && \
	ln -s '$(CURDIR)'/hf_batchllm/* '$(CURDIR)/kernels' '$(CURDIR)/patches' $(TYPED)/hf_batchllm/ && \
	cd $(TYPED) && '$(CURDIR)/$(VENV)/bin/python' -m mypy --config-file '$(CURDIR)/pyproject.toml' -p hf_batchllm

types: $(INSTALLED)
	@$(TYPE_CHECK)

lint: ruff types

ruff: $(INSTALLED)
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --quiet --check . || { $(VENV)/bin/python -m ruff format --check .; exit 1; }

# Starts clusters, which takes a minute, and installs Ray into the environment.
test-ray: $(INSTALLED)
	@$(VENV)/bin/pip install -q -c constraints.txt -e '.[ray]'
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q tests/test_ray.py $(ARGS)

test-oldest: $(INSTALLED_OLDEST)
	@$(ONE_CORE) $(VENV_OLDEST)/bin/python -m pytest -q -n $(JOBS) --dist loadgroup $(ARGS)

test-newest: $(INSTALLED_NEWEST)
	@$(ONE_CORE) $(VENV_NEWEST)/bin/python -m pytest -q -n $(JOBS) --dist loadgroup $(ARGS)

SWEEP := tests/sweep_models.py --jobs $(JOBS)

sweep: $(INSTALLED_NEWEST)
	@$(VENV_NEWEST)/bin/python $(SWEEP) $(or $(ARGS),--write-page)

kernel-page: $(INSTALLED)
	@$(VENV)/bin/python tests/compile_for_cards.py

sweep-oldest: $(INSTALLED_OLDEST)
	@$(VENV_OLDEST)/bin/python $(SWEEP) $(ARGS)

pictures: $(INSTALLED)
	@$(VENV)/bin/python docs/make_pictures.py
	@$(VENV)/bin/python docs/make_tour_pictures.py

# The wheel is built from the source distribution, and the tests are those that it holds: quick ones of many parts, which
# need no checkout. They run in an environment with the wheel, what it requires and pytest alone.
DIST := build/dist
DIST_TESTS := test_planning_scheduler test_results_timeline test_inputs_prompts test_sampling_noise test_files_records \
	test_generator_generate test_generator_lifecycle test_engine_score test_integrations_accelerated

dist:
	@$(check_python)
	@rm -rf dist $(DIST) && mkdir -p $(DIST)/source $(DIST)/tried
	@$(PYTHON) -m venv $(DIST)/tools && $(DIST)/tools/bin/python -m pip install --quiet build twine
	@$(DIST)/tools/bin/python -m build --outdir dist . >$(DIST)/build.log 2>&1 || { cat $(DIST)/build.log; exit 1; }
	@$(DIST)/tools/bin/python -m twine check --strict dist/*
	@tar -xzf dist/*.tar.gz -C $(DIST)/source --strip-components 1
	@echo "installing the wheel into a clean environment"
	@$(PYTHON) -m venv $(DIST)/env
	@$(call pip_install,$(DIST)/env,dist/*.whl pytest pytest-timeout pytest-xdist hypothesis,constraints.txt)
	@cp -R $(DIST)/source/tests $(DIST)/source/examples $(DIST)/source/pyproject.toml $(DIST)/tried
	@$(DIST)/env/bin/hf-batchllm --version
	@cd $(DIST)/tried && OMP_NUM_THREADS=1 ../env/bin/python -m pytest -q -p no:cacheprovider -n $(JOBS) --dist loadgroup \
		$(DIST_TESTS:%=tests/%.py)
	@ls -l dist

# Where pip finds a PyTorch without CUDA, which is 3 GB smaller: for Linux without a GPU of NVIDIA's, if the place
# answers. `make TORCH_INDEX= demo` takes the one of the package index.
TORCH_INDEX ?= $(shell test "`uname -s`" = Linux && ! command -v nvidia-smi >/dev/null && echo https://download.pytorch.org/whl/cpu)
ANSWERS = import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5).close()

# $(call pip_install,environment,what,constraints)
define pip_install
index="$(strip $(TORCH_INDEX))"; \
test -z "$$index" || $(PYTHON) -c '$(ANSWERS)' "$$index" 2>/dev/null || { \
	echo "$$index does not answer, so PyTorch comes from the package index, as a build with CUDA that takes some 5 GB of disk (Ctrl-C stops; try again later)"; \
	index=; }; \
PYTHONWARNINGS=ignore $(1)/bin/python -m pip install --quiet --no-compile $(2) -c $(3) \
	$${index:+--extra-index-url $$index}
endef

NEEDS_PYTHON := hf-batchllm needs Python 3.11 or newer; try make PYTHON=python3.11
define check_python
command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) here: $(NEEDS_PYTHON)" >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(NEEDS_PYTHON)")'
endef

EVERYTHING := test,demo,json,notebook,lm-eval,trl

# Packages that others bring along and hardly import, and what is compiled to machine code beside its source.
SELDOM := sklearn|nltk|networkx|pygments/lexers|mypy|mypyc

$(VENV)/.installed-demo $(INSTALLED): constraints.txt
$(INSTALLED_OLDEST): constraints-oldest.txt
$(INSTALLED_NEWEST): constraints-newest.txt
$(VENV)/.installed-demo: EXTRAS := demo
$(INSTALLED) $(INSTALLED_OLDEST) $(INSTALLED_NEWEST): EXTRAS := $(EVERYTHING)
$(VENV)/.installed-demo $(INSTALLED) $(INSTALLED_OLDEST) $(INSTALLED_NEWEST): pyproject.toml setup.py
	@$(check_python)
	@# Without the link the next try creates what this one could not, say for want of Debian's python3-venv.
	@test -x $(@D)/bin/python || { echo "creating $(@D)"; $(PYTHON) -m venv $(@D) || { rm -f $(@D)/bin/python; exit 1; }; }
	@echo "installing hf-batchllm and what `test $(EXTRAS) = demo && echo the demonstration || echo everything here` needs into $(@D) (a minute or more the first time)"
	@$(call pip_install,$(@D),-e '.[$(EXTRAS)]',$(filter constraints%,$^))
	@# On all cores, where pip compiles on one. Left out: what few import, and what is for a newer Python.
	@$(@D)/bin/python -m compileall -qq -j 0 -x '/(tests|torch/(testing|_inductor)|transformers/models|$(SELDOM))/' $(@D)/lib \
		|| echo "some modules could not be compiled: the first import of them takes longer"
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_NEWEST) .models build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hf_batchllm kernels patches tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
