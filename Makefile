# make demo, make test, ...: each makes .venv, installs and builds what it needs, then runs. See bootstrap.sh.
#
#   PYTHON=python3.12          the Python to use; where it already has torch, that torch is used
#   TORCH=torch==2.12.0        the torch to install, a pip requirement
#   TORCH_INDEX=https://...    the package index to install that torch from
#   GROUPED_LINEAR_CUDA_ARCHS=90a-real   what CUDA kernels are built for; by default the GPUs at hand, and where there is
#                              none the CPU alone (OFF); make wheel builds for every GPU that is supported
#
# A .venv that is there stays in use until one of the three says otherwise, or make clean.

python := .venv/bin/python
# Where .venv is linked to another environment's packages, that one has the program, on the PATH.
ruff := PATH="$(CURDIR)/.venv/bin:$$PATH" ruff

# Threads that wait soon give their core back instead of spinning on it. Nothing changes on a quiet
# machine (FP8 demo step 54 ms on 2 cores either way); beside one busy process a step stays at 0.15 s
# instead of 0.4 to 3 s.
export GOMP_SPINCOUNT ?= 1000
# Tests read documents, which are in UTF-8, whatever the locale is.
export PYTHONUTF8 ?= 1

.PHONY: help demo test nightly lint docs clients torchtitan sanitize sanitize-gpu release_tools wheel check-wheel clean

help:
	@sed -n 's/^## //p' Makefile

## make demo    train a small mixture-of-experts language model through the ops
demo:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" ./bootstrap.sh build demo
	@$(python) -m benchmarks.demo

## make test    ruff, mypy, the documentation's examples and the tests
# The slowest comes last: a slip in the style is known in a second, and pytest's summary ends the log. Two
# processes: a test that compiles keeps one core busy most of the time.
test: lint
	@# integrations/peft.py cannot be imported without PEFT: make clients runs its example.
	$(python) -m pytest -q --doctest-modules --doctest-ignore-import-errors --pyargs grouped_linear
	$(python) -m pytest -n 2

## make nightly    what takes longer than CI may: every example, sanitizers, wheels beside old and new torch, clients
nightly:
	@.ci/nightly

## make lint    ruff and mypy alone
lint:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" ./bootstrap.sh build demo test
	@# No file is committed with a conflict in it; the hook sees what is staged, this what is there.
	@! git grep -nE '^(<{7}|>{7}) '
	$(ruff) check
	$(ruff) format --check
	$(python) -m mypy -p grouped_linear

## make docs    the documentation site, in site/; python -m http.server -d site shows it
docs:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" ./bootstrap.sh build docs
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

## make clients transformers' Trainer and DistributedConfig, accelerate, PEFT, Lightning, torchao, trl, in .venv-clients
clients:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" ./bootstrap.sh build test
	@tests/clients/run.sh clients --nightly tests/clients tests/test_examples.py

## make torchtitan   torchtitan's models and Trainer with our experts, in .venv-torchtitan; on two GPUs where they are
torchtitan:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" ./bootstrap.sh build test
	@tests/clients/run.sh torchtitan --nightly tests/test_torchtitan.py tests/test_torchtitan_training.py \
		tests/test_examples.py

## make sanitize  the ops' tests on CPU kernels with sanitizers: gcc's for memory, clang 19's for threads
sanitize:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" ./bootstrap.sh build test
	@.ci/sanitize address
	@.ci/sanitize thread

## make sanitize-gpu   CUDA kernels with compute-sanitizer, on a GPU: ten minutes
sanitize-gpu:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" GROUPED_LINEAR_BUILD_PORTABLE=1 ./bootstrap.sh build test
	@.ci/sanitize_gpu

#   PYTHONS="python3.11 ..."   make wheel, make check-wheel: the Pythons, by default .venv's
PYTHONS ?= $(python)

release_tools:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" ./bootstrap.sh build release

## make wheel   the packages of a release in dist/: a source distribution, and a wheel for each of PYTHONS
wheel: release_tools
	$(python) .ci/wheels.py build $(PYTHONS)

## make check-wheel    the wheels in clean environments, with each torch of the package index: 2 GB each
check-wheel: release_tools
	$(python) .ci/wheels.py check $(PYTHONS)

## make clean   remove .venv, .venv-clients, .venv-torchtitan and everything that was built
clean:
	rm -rf .venv .venv-clients .venv-torchtitan build dist demo site .mypy_cache .pytest_cache .ruff_cache
