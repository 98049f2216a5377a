# Every target sets up what it needs; only Python 3.11 or newer and make must be there.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test slow-test gpu-test bench bench-page lint types docs test-site serve-docs links clean

# an environment of its own: the tests' libtpu would look for a TPU and say so in the demo
demo: $(VENV)-demo/demo.installed
	@$(VENV)-demo/bin/python docs/examples/digits.py

# a file to a process, so that its tests share what they have set up
test: $(VENV)/test.installed
	$(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile --no-loadscope-reorder

# the tests that take long: figures of the compiler, several processes, and the code of pages and
# examples, which `make docs` runs too, with the JAX of its environment
slow-test: $(VENV)/test.installed
	$(BIN)/python -m pytest -m 'slow and not gpu' -n 2 --dist loadfile --no-loadscope-reorder

# under five minutes; without an accelerator, on eight simulated devices
bench: $(VENV)-bench/rich.installed $(VENV)-bench/examples.installed
	@$(VENV)-bench/bin/python -m benchmarks all

# measure all figures of docs/performance.md, which takes long. RESULT names the file of figures,
# BENCH adds options, such as --seconds 5
RESULT ?= cpu
bench-page: $(VENV)-page/rich.installed $(VENV)-page/examples.installed $(VENV)-page/tpu.installed
	@mkdir -p benchmarks/results
	@$(VENV)-page/bin/python -m benchmarks all --large --topology v5e:4x4 \
	    --topology v5e:16x16 --topology '2*v5e:4x4' $(BENCH) --json benchmarks/results/$(RESULT).json
	@$(VENV)-page/bin/python -m benchmarks page

# `make test` does not install ruff, pyright, mypy and library-skills, and skips the tests that need
# them

lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/test_eject.py tests/test_skill.py -k 'ruff or wheel'

# the tests that compile for GPUs. Toolkits would hide a missing compiler, so they are hidden
gpu-test: $(VENV)-gpu/test.installed $(VENV)-gpu/gpu.installed
	.ci/hide_cuda $(VENV)-gpu/bin/python -m pytest -m gpu -n 2

# the package, then a file of user code
types: $(VENV)/dev.installed
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_annotations.py

# an environment of its own: with JAX's CUDA plugin, JAX prints at its start that there is no GPU.
# Without -q, Sphinx says which page it runs
docs: $(VENV)-docs/docs.installed $(VENV)-docs/gpu.installed
	$(VENV)-docs/bin/sphinx-build -W --keep-going -j 2 -b html docs docs/_build/html
	@echo 'docs/_build/html/index.html'

# the playground and the search of the built site, in headless Chromium
test-site: docs $(VENV)/test.installed
	@SITE=docs/_build/html $(BIN)/python -m pytest -q tests/test_playground.py tests/test_search.py

# that links to other sites lead somewhere; needs the network
links: $(VENV)/docs.installed
	$(BIN)/sphinx-build --keep-going -q -b linkcheck -D nb_execution_mode=off \
	    -D suppress_warnings=myst-nb.lexer docs docs/_build/links

# PORT names another one
PORT ?= 8000
serve-docs: docs
	@echo 'http://127.0.0.1:$(PORT), until Ctrl-C'
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build/html $(PORT)

# one stamp for each extra: installed again when pyproject.toml changes
%.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	    "einshard needs Python 3.11 or newer, and $(PYTHON) is %d.%d; " % v[:2] \
	    + "name another one: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@echo 'installing einshard[$(*F)] and what it needs in $(@D), once'
	@test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(*F)]'
	@touch $@

clean:
	rm -rf .venv* build dist docs/_build docs/jupyter_execute
