# `make demo` and `make test` are all that a newcomer needs. Both work without a GPU and say so.
PYTHON ?= python3
BIN := .venv/bin
PHOTOS := build/photos

# The suite starts hundreds of interpreters. Without bytecode files each of them would compile the package.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-fast test-matrix test-clients test-all soak test-emulated lint docs bench gate efficiency bench-peers mutants photos release constraints clean

# With what the demo needs alone; then with all the rest.
$(BIN)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip==26.3  # the first pip that reads dependency groups is 25.1
	$(BIN)/pip install --constraint constraints.txt --group demo  # not quiet: it shows how far the downloads are
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

$(BIN)/.ready: $(BIN)/.demo
	$(BIN)/pip install --constraint constraints.txt --group dev
	touch $@

# What the groups of pyproject.toml bring today, into constraints.txt.
constraints:
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/pip install --quiet --upgrade pip==26.3
	build/constraints/bin/pip install --quiet --group dev --group docs
	$(PYTHON) tests/compatibility/constraints.py build/constraints

$(PHOTOS)/.ready: $(BIN)/.demo benchmarks/photos.py
	$(BIN)/python benchmarks/photos.py $(PHOTOS) --count 2000
	touch $@

photos: $(PHOTOS)/.ready

demo:
	@test -e $(PHOTOS)/.ready || echo "The first run installs PyTorch and albumentations into .venv (2 GB, and 4 GB" \
	  "more if PyTorch comes with CUDA), and draws 2,000 JPEGs (180 MB) into build/photos: five minutes, or" \
	  "as long as the download takes. Each run then takes one or two minutes."
	@$(MAKE) --no-print-directory photos
	$(BIN)/python benchmarks/demo.py $(PHOTOS)

test: $(BIN)/.ready
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10 $(if $(RECORD),--record=$(RECORD))

# What to run at each edit: less than a minute on two cores.
test-fast: $(BIN)/.ready
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m "not slow and not matrix"

# The tests of test-fast on other releases of Python, PyTorch and NumPy, each in an environment of its own below
# build/matrix that is removed afterwards (up to 3 GB). Interpreters are python3.11 to python3.14, python3.13t and
# python3.14t on PATH, or those of PYTHONS="PATH PATH". MATRIX_ARGS='--only "3.13, torch newest"' runs one row.
PYTHONS ?=
MATRIX_ARGS ?=
test-matrix:
	$(PYTHON) tests/compatibility/run.py --pythons "$(PYTHONS)" $(MATRIX_ARGS)

# Random cases until the time is over, from any seed on, or from SEED.
MINUTES ?= 30
soak: $(BIN)/.ready
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# What needs a GPU, without one: a CUDA build of torch (5 GB) over a runtime that works on the CPU.
build/cuda/.ready: pyproject.toml
	$(PYTHON) -m venv build/cuda
	build/cuda/bin/pip install --quiet --upgrade pip==26.3
	build/cuda/bin/pip install --quiet --group emulated-cuda
	touch $@

test-emulated: build/cuda/.ready
	build/cuda/bin/python -m tests.emulated_cuda -m pytest -m gpu tests/device

# Scripts of other libraries over both loaders, in environments of pinned releases below build/clients; 5 GB, and
# half an hour. One client: make test-clients CLIENTS_ARGS="-k Lightning"
CLIENTS := build/clients
CLIENTS_ENVIRONMENTS := $(foreach name,shared albumentationsx,$(CLIENTS)/$(name)/.ready)
CLIENTS_PINS := tests/clients/requirements
CLIENTS_ARGS ?=

$(CLIENTS)/%/.ready: $(CLIENTS_PINS)/%.txt $(CLIENTS_PINS)/torch.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $(CLIENTS_PINS)/torch.txt
	$(@D)/bin/pip install --quiet --no-deps --requirement $<
	touch $@

test-clients: $(BIN)/.ready $(CLIENTS_ENVIRONMENTS)
	$(BIN)/pytest tests/clients --numprocesses 2 --dist load -o faulthandler_timeout=600 $(CLIENTS_ARGS)

# The sdist and the wheel, checked by twine and installed each into an empty environment with all libraries at their lower
# bounds. Without torch: test-matrix has it at its lower bound, and the commands below need none.
BOUNDS = $(shell sed -n '/^dependencies/,/^]/s/^ *"\([a-z]*\)>=\([0-9.]*\)".*/\1==\2.*/p' pyproject.toml | grep -v ^torch)
release: $(BIN)/.ready
	rm -rf dist build/release
	$(BIN)/pip install --quiet twine==6.2.0
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(BIN)/twine check --strict dist/*
	set -e; for file in dist/*; do \
	  $(PYTHON) -m venv --clear build/release; \
	  build/release/bin/pip install --quiet hatchling==1.33.0 $(BOUNDS); \
	  build/release/bin/pip install --quiet --no-deps --no-build-isolation $$file; \
	  build/release/bin/fastload --version; build/release/bin/fastload cache ls build; \
	  build/release/bin/python -c "import fastload, fastload.errors; print(len(fastload.__all__), 'names')"; \
	done

# All that can be tested without a GPU, before a release: two hours and more; the environments take 10 GB.
# SINCE is the revision whose changed files are mutated.
SINCE ?= HEAD~20
test-all: test-clients test-emulated docs
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10 --thorough
	$(MAKE) mutants FILE="--since $(SINCE)"
	$(MAKE) soak MINUTES=30

lint: $(BIN)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages of docs/ as a site in build/site. The build checks links, anchors and the names of the API page.
build/docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/docs
	build/docs/bin/pip install --quiet --upgrade pip==26.3
	build/docs/bin/pip install --quiet --constraint constraints.txt --group docs
	touch $@

docs: build/docs/.ready
	build/docs/bin/mkdocs build --strict --site-dir build/site

# A change of the transport is judged by the first of these: no kind of sample should lose against torch by it.
bench: $(PHOTOS)/.ready
	$(BIN)/python benchmarks/zero_cost.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/training.py $(PHOTOS)

# This checkout beside a revision, on the rows that must not get slower; 15 minutes. GATE_ARGS="--only cached" picks rows.
OLD ?= HEAD
GATE_ARGS ?=
gate: $(PHOTOS)/.ready
	$(BIN)/python benchmarks/gate.py $(OLD) . --photos $(PHOTOS) $(GATE_ARGS)

# Loaders on 1, 2, 4, ... all cores; some minutes.
efficiency: $(PHOTOS)/.ready
	$(BIN)/python benchmarks/efficiency.py $(PHOTOS) --chart build/efficiency.svg

# Other loaders in the same run, each in an environment of its own below build/peers; 6 GB, and 7 GB of images.
# FFCV is compiled and needs Debian's libturbojpeg0-dev, libopencv-dev, pkg-config and g++; SPDL needs ffmpeg.
# A loader that cannot be installed gets rows that say so.
PEERS := build/peers
PEERS_ENVIRONMENTS := $(foreach name,shared mosaic dali ffcv,$(PEERS)/$(name)/.ready)
PEERS_PINS := benchmarks/peers/requirements
PEERS_ARGS ?= --runs 5

$(PEERS)/%/.ready: $(PEERS_PINS)/%.txt $(PEERS_PINS)/torch.txt $(PEERS_PINS)/albumentations.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	-$(@D)/bin/pip install --quiet --requirement $(PEERS_PINS)/torch.txt \
		&& $(@D)/bin/pip install --quiet --no-deps --requirement $< && touch $@

bench-peers: $(PHOTOS)/.ready $(PEERS_ENVIRONMENTS)
	$(BIN)/python benchmarks/peers/run.py $(PHOTOS) $(PEERS_ARGS)

# Which changes of the code the tests do not notice; not part of CI. A sample of all files takes hours.
# One file, all of its mutants: make mutants FILE=ring.py SAMPLE=0
SAMPLE ?= 40
$(BIN)/.mutants: $(BIN)/.ready
	$(BIN)/pip install --quiet --group mutants
	touch $@

mutants: $(BIN)/.mutants
	$(BIN)/python tests/mutants/run.py $(FILE) --sample $(SAMPLE)

clean:
	rm -rf .venv build dist
