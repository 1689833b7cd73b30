# Each target stands alone: on a fresh machine it first makes .venv with pinned versions, later runs reuse it.
PYTHON ?= python3
export DATA ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
DIFFUSERS := 0.41.0 0.42.0 0.42.1

.PHONY: help demo test test-slow matrix lint gpu-test gpu-test-sm80 sanitize clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z0-9-]+:.*  ## / { printf "make %-14s%s\n", $$1, $$2 }' Makefile

demo: $(INSTALLED)  ## prepare, measure, plan, train, resume, report on small real files (DATA=folder for your own clips)
	bash recipes/demo.sh "$$DATA"

# In the order of files: by number of tests, the one that compiles all kernels would come last and alone.
test: $(INSTALLED)  ## everything that needs no GPU, on two processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not slow" --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-slow: $(INSTALLED)  ## minutes of kills and resumes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu"

# Everything else stays as pinned.
matrix: $(INSTALLED)  ## the model half with the oldest supported diffusers, one between, and the newest
	for release in $(DIFFUSERS); do \
		folder=.venv/diffusers-$$release; \
		[ -d $$folder ] || $(BIN)/python -m pip install --quiet --no-deps --target $$folder diffusers==$$release; \
		PYTHONPATH=$(CURDIR)/$$folder $(BIN)/python -m pytest tests/adaln -m "not gpu and not slow" || exit 1; \
	done

gpu-test: $(INSTALLED)  ## what needs a GPU; builds the kernels first
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -m pytest -m gpu

# What GPUs before Hopper run, by way of PTX on any GPU: the extension is built into a folder of its own.
gpu-test-sm80: $(INSTALLED)  ## 300 random cases through the code for compute 8.0
	TORCH_CUDA_ARCH_LIST="8.0+PTX" $(BIN)/python setup.py --quiet build --build-base build/sm80 --build-lib build/sm80/lib
	PYTHONPATH=build/sm80/lib $(BIN)/python -P -m pytest tests/adaln/test_random_gpu.py

# With torch's allocator in between, memory of freed tensors would look initialised.
sanitize: $(INSTALLED)  ## compute-sanitizer over every CUDA kernel, small inputs
	$(BIN)/python setup.py --quiet build_ext --inplace
	for tool in memcheck initcheck synccheck racecheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(BIN)/python tests/support/sanitize_sweep.py || exit 1; \
	done

lint: $(INSTALLED)  ## style, and the types of the public names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove .venv, builds and the demo's output
	rm -rf .venv build demo_output adaptiveload_hf/*.so *.egg-info

$(INSTALLED): .ci/install.sh .ci/constraints.txt setup.cfg setup.py
	PYTHON=$(PYTHON) bash .ci/install.sh
	touch $@
