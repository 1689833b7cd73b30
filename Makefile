# Each target stands alone: on a fresh machine it first makes .venv with pinned versions, later runs reuse it.
PYTHON ?= python3
DATA ?=
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint gpu-test clean

demo: $(INSTALLED)  ## prepare, measure, fit, plan, train, resume, report on small real files (DATA=folder for your own)
	bash recipes/demo.sh $(DATA)

test: $(INSTALLED)  ## everything that needs no GPU
	$(BIN)/python -m pytest -m "not gpu"

gpu-test: $(INSTALLED)  ## what needs a GPU; builds the kernels first
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -m pytest -m gpu

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv build demo_output adaptiveload_hf/*.so *.egg-info

$(INSTALLED): .ci/install.sh .ci/constraints.txt setup.cfg setup.py
	PYTHON=$(PYTHON) bash .ci/install.sh
	touch $@
