# Everything runs in .venv, which these targets make from a bare checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INTEROP := .venv-interop
CLIENTS := .venv-clients
LOWEST := .venv-lowest
# What needs no transformers: the version that is compared with wants newer tokenizers than the lowest.
CORE := --ignore tests/text/test_chat_parity.py tests/text tests/fuzz tests/engine/test_engine.py \
	tests/engine/test_requests.py tests/constrain/test_structure.py tests/server/test_chat.py \
	tests/server/test_refusals.py tests/train/test_files.py

.PHONY: demo test test-lowest replicas lint fix bench docs dist interop lock locked sbom audit clean

demo: $(READY)  ## a minute with the built-in model
	$(BIN)/python -m examples.demo

out/tiny/model.safetensors: $(READY)
	$(BIN)/python -m examples.tiny_model out/tiny

# Two processes of one thread each: tiny models gain nothing from a second thread.
test: $(READY) lint  ## lint, types and all tests
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

replicas: $(READY)  ## all tests of replicas on a private Ray; `make test` leaves out those that wait long
	DGEMMA_TEST_REPLICAS=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/scale

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
	$(BIN)/python bench/nano.py

docs: $(READY) out/tiny/model.safetensors  ## pages that are generated
	$(BIN)/python -m examples.picture out/tiny docs/settling.svg
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_serve.py
	$(BIN)/python docs/make_training.py
	$(BIN)/python docs/make_outputs.py

dist: $(READY)  ## sdist and wheel with their hashes, see docs/release.md
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m pip check
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

interop: $(INTEROP)/.ready $(CLIENTS)/.ready  ## mlx-vlm and PEFT on our files; LiteLLM, LangChain, lm-eval as clients
	$(INTEROP)/bin/python -m pytest tests/interop tests/weights/test_lora.py

lock: $(READY)  ## requirements.lock: digests of what constraints.txt pins
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	{ echo '# SHA-256 of the versions in constraints.txt, torch and triton excepted (SECURITY.md); written by `make lock`.'; \
	  grep -v -E '^(#|torch==|triton==)' constraints.txt | $(BIN)/uv pip compile --quiet --no-header --no-annotate \
	    --no-deps --universal --python-version 3.11 --generate-hashes - ; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

locked:  ## .venv from requirements.lock: every file has the digest that is written there, torch excepted
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $(READY)

sbom: $(READY)  ## out/sbom.cdx.json, CycloneDX
	mkdir -p out
	$(BIN)/python .ci/supply_chain.py sbom > out/sbom.cdx.json

audit: $(READY)  ## known weaknesses of the pinned versions, by PyPI; ADVISORIES=a file of OSV's, no network
	$(BIN)/python .ci/supply_chain.py audit $(ADVISORIES)

# Run with the lowest versions that pyproject.toml allows: its ranges are a promise.
test-lowest: $(LOWEST)/.ready  ## a core part of the tests with the lowest versions
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(LOWEST)/bin/python -m pytest -p no:cacheprovider $(CORE)

clean:
	rm -rf $(VENV) $(INTEROP) $(CLIENTS) $(LOWEST) build dist out *.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $(READY)

$(INTEROP)/.ready: pyproject.toml constraints.txt tests/interop/requirements.txt
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-r tests/interop/requirements.txt -e ".[test]"
	touch $@

$(CLIENTS)/.ready: tests/interop/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/interop/clients.txt
	touch $@

$(LOWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip compile --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
		--extra serve --extra train pyproject.toml -o $(LOWEST)/lowest.txt
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python -r $(LOWEST)/lowest.txt
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python -c $(LOWEST)/lowest.txt \
		pytest pytest-timeout hypothesis httpx "openai>=2" anthropic jsonschema safetensors gguf babel
	touch $@
