# Every target works on a machine that has only Python 3.11 or newer: the first one that is run makes .venv.
#
#   make test PYTHON=python3.12    another interpreter for .venv
#   make test VENV=path            an environment that already holds everything; used as it is
#   make test SYSTEM=1             $(PYTHON) itself, without an environment (its own torch, no network)
#   make test ARGS="-k schedule"   more arguments for pytest, the demo or the benchmark

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PIP_ARGS ?=

ifdef SYSTEM
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
# Only the project's own .venv is built; an environment that was named by the user is left alone.
READY := $(if $(filter file,$(origin VENV)),$(VENV)/.ready)
endif

# The demo needs neither linters nor tests: unless .venv is there already, it has a smaller environment.
DEMO_VENV := $(if $(wildcard .venv/.ready),.venv,.venv-demo)
DEMO_READY := $(if $(READY),$(DEMO_VENV)/.ready)
DEMO_PY := $(if $(READY),$(DEMO_VENV)/bin/python,$(PY))

# One environment per version of torch: constraints.txt with the line of torch replaced.
TORCH_VENV = .venv-torch-$(TORCH)

# What is compiled once is read by all processes of the tests: without it each child takes a second more to begin.
unexport PYTHONDONTWRITEBYTECODE

# Tests run on all cores where pytest-xdist is installed; those of a file in one process, which compiles its models once.
PYTEST = $(PY) -m pytest $(shell $(PY) -c 'import xdist; print("-n auto --dist loadfile")' 2>/dev/null)

# Tests on a simulated device with memory and streams of its own; skipped where there is no C++ compiler.
SIMULATED = -p tests.simulated_device.plugin tests/simulated_device tests/simulated_runs tests/gpu

.DEFAULT_GOAL := help
.PHONY: docs nightly gpu-report faults mutants seeds help demo test check format-check lint types fix accept bench gpu zoo test-torch zoo-torch clean

help:
	@echo 'make demo    train a small language model through the whole compiler, interrupted and resumed, in a minute or two'
	@echo 'make test    all tests that need neither a GPU nor the network, for every change; ends with those on a simulated accelerator'
	@echo 'make nightly campaigns: long tests, other trainers, the zoo, planted faults, kills, random configurations, seeds; hours'
	@echo 'make gpu     the tests that need an accelerator'
	@echo 'make check   format, lint, strict types, tests with warnings as errors'
	@echo 'make fix     rewrite what ruff can mend'
	@echo 'make accept  rewrite the golden texts, to be read as a diff'
	@echo 'make bench   compare with eager PyTorch under activation checkpointing; PEERS=folder: with other trainers too'
	@echo 'make gpu-report PART=A   tests and benchmarks of a machine with a GPU; parts A to E, nine minutes each (docs/gpu.md)'
	@echo 'make zoo     hundreds of models against eager PyTorch; writes docs/models.md'
	@echo 'make docs    the pages and the API reference as a site, in site/; a broken link or a missing name fails'
	@echo 'make faults  kills, interrupts at each line and random configurations, about 20 minutes; ARGS chooses pieces'
	@echo 'make mutants plants faults in a copy of the project; each must be seen by its tests'
	@echo 'make seeds   every hypothesis test with 20 random seeds; ARGS="--first 7 --count 3 tests/scheduler" chooses pieces'
	@echo 'make test-torch TORCH=2.14.1   all tests on another version of torch, in an environment of its own'
	@echo 'make zoo-torch TORCH=2.14.1    the models, likewise; writes nothing'

CHECK_PYTHON = import sys; sys.exit("megatrain needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)
.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[test]'
	@touch $@

.venv-demo/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv --clear .venv-demo
	.venv-demo/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[hf]'
	@touch $@

# The first process interrupts itself in mid-step, as Ctrl-C would (status 130); the second goes on from its checkpoint.
demo: $(DEMO_READY)
	$(DEMO_PY) -m megatrain demo --interrupt-at 0.5 $(ARGS) || [ $$? -eq 130 ]
	$(DEMO_PY) -m megatrain demo --resume $(ARGS)

# The simulated accelerator is torch's for a whole process, so its tests have one of their own.
test: $(READY)
	$(PYTEST) $(ARGS)
	$(if $(ARGS),,$(PYTEST) $(SIMULATED))

check: format-check lint types test

format-check: $(READY)
	$(PY) -m ruff format --check .

lint: $(READY)
	$(PY) -m ruff check .

types: $(READY)
	$(PY) -m pyright --pythonpath $(PY)

fix: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# One process: the inline texts of one file are rewritten by line number.
accept: $(READY)
	$(PY) -m pytest --accept $(ARGS)

bench: $(READY)
	$(PY) -m benchmarks.bench $(ARGS)
	$(PY) -m benchmarks.steps $(STEP_ARGS)
	$(if $(PEERS),$(PY) -m benchmarks.peers --harness $(PEERS) $(PEER_ARGS))

gpu: $(READY)
	@$(PY) -c 'import sys, torch; sys.exit(0 if torch.accelerator.is_available() else "make gpu: torch finds no accelerator here")'
	$(PY) -m pytest tests/gpu -m 'nightly or not nightly' $(ARGS)

# Tests, benchmarks and figures of a machine with a GPU, in five parts: docs/gpu.md.
gpu-report: $(READY)
	$(PY) -m benchmarks.gpu $(if $(PART),--part $(PART)) $(ARGS)

# Models of diffusers and peft are skipped where those aren't installed; `pip install -e .[zoo]` adds them.
zoo: $(READY)
	$(PY) -m tests.zoo --markdown docs/models.md $(ARGS)

# Other libraries' trainers, whose scripts are compared with the stock run of each.
.venv-users/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-users
	.venv-users/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[users]'
	@touch $@

# What make test leaves out, with four times as many random models, budgets and orders. One part can be run by its own command.
USERS_PY = .venv-users/bin/python
nightly: .venv-users/.ready
	$(USERS_PY) -m pytest -n auto --dist loadfile -m 'nightly or not nightly' --hypothesis-profile=seeds $(ARGS)
	$(USERS_PY) -m pytest -n auto --dist loadfile $(SIMULATED) -m 'nightly or not nightly' --hypothesis-profile=seeds $(ARGS)
	$(USERS_PY) -m tests.mutants
	$(USERS_PY) -m tests.faults
	$(USERS_PY) -m tests.faults --simulated --only configurations
	$(USERS_PY) -m tests.zoo

# The pages and the reference, as a site. The docstrings are read from the sources: this environment needs no torch.
DOCS_OF = import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))
.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python -c '$(DOCS_OF)' > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -r .venv-docs/requirements.txt
	@touch $@

docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict $(ARGS)

ifdef TORCH
$(TORCH_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(TORCH_VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install $(PIP_ARGS) -c $(TORCH_VENV)/constraints.txt -e '.[zoo]'
	@touch $@

test-torch: $(TORCH_VENV)/.ready
	$(MAKE) test VENV=$(TORCH_VENV)

zoo-torch: $(TORCH_VENV)/.ready
	$(TORCH_VENV)/bin/python -m tests.zoo $(ARGS)
else
test-torch zoo-torch:
	@echo 'make $@: name the version, make $@ TORCH=2.14.1'; exit 2
endif

clean:
	rm -rf megatrain-demo megatrain-demo-report.html site .venv .venv-demo .venv-users .venv-docs .venv-torch-* .pytest_cache .ruff_cache .hypothesis

# ARGS="--only kills --seed 3 --count 50": a piece; `--help` lists the rest.
faults: $(READY)
	$(PY) -m tests.faults $(ARGS)

seeds: $(READY)
	$(PY) -m tests.seeds $(ARGS)

mutants: $(READY)
	$(PY) -m tests.mutants $(ARGS)
