# Everything runs in .venv, which these targets make from a bare checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INTEROP := .venv-interop

.PHONY: demo test lint fix bench docs interop clean

demo: $(READY)  ## a minute with the built-in model
	$(BIN)/python -m examples.demo

out/tiny/model.safetensors: $(READY)
	$(BIN)/python -m examples.tiny_model out/tiny

# Two processes of one thread each: tiny models gain nothing from a second thread.
test: $(READY) lint  ## lint, types and all tests
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(READY)  ## what can be mended by a tool
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## the CPU numbers of the README
	$(BIN)/python bench/cpu_step.py
	$(BIN)/python bench/step.py --device cpu --shapes example --context 1024 16384 --batch 1 4

docs: $(READY) out/tiny/model.safetensors  ## pages that are generated
	$(BIN)/python -m examples.picture out/tiny docs/settling.svg
	$(BIN)/python docs/make_cli.py

interop: $(INTEROP)/.ready  ## what mlx-vlm and PEFT make of the built-in model
	$(INTEROP)/bin/python -m pytest tests/interop tests/weights/test_adapter.py

clean:
	rm -rf $(VENV) $(INTEROP) build dist out *.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $(READY)

$(INTEROP)/.ready: pyproject.toml constraints.txt tests/interop/requirements.txt
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-r tests/interop/requirements.txt -e ".[test]"
	touch $@
