# Every target sets itself up. `make help` lists them.
PYTHON ?= python3
PRESET ?= digits-eps3
ARGS   ?=
SOURCE ?=
TEACH  ?=
NB     ?= $(sort $(wildcard nbs/*.ipynb nbs/*/*.ipynb nbs/workshop/*/*.ipynb))
BIN    := .venv/bin
# Two test workers: one thread each, or they fight over the cores.
ONE    := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# glibc gives big blocks back after every step, and fresh pages cost more than the arithmetic on them: keep them.
HEAP   := MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864
ROOT   := $(if $(filter 0,$(shell id -u)),--allow-root,)

.PHONY: help setup lab train lint test test-slow test-path test-teach test-browser test-docs chromium assignments grade docs notebooks review export readme bench wheel clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: .venv/.ready ## create .venv with the pinned packages (about 2 minutes and 6 GB, once)

.venv/.ready: constraints.txt settings.ini setup.py
	@echo "Setting up .venv with the versions in constraints.txt: about two minutes and 6 GB, only once ..."
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3,11) else f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11 setup")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "  1/3 build tools";            $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt setuptools wheel
	@echo "  2/3 packages (the long one)"; $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@echo "  3/3 checking that they fit together"; $(BIN)/python -m pip check
	@touch $@

# tools/lab: JupyterLab's settings, so that its first question is not whether you want news.
# A student's copy is made once and never overwritten; SOURCE=1 opens the notebooks from which it is made.
# tools/lab/students: without nbgrader's buttons, also where nbgrader is installed.
HOME_OF_LAB := $(if $(filter 1,$(SOURCE)),nbs,student)

lab: .venv/.ready ## open the course in JupyterLab, in your own copy: student/ (authors: SOURCE=1; nbgrader's buttons: TEACH=1)
	@$(if $(filter 1,$(SOURCE)),,$(BIN)/python tools/student.py)
	@echo "Starting JupyterLab on $(HOME_OF_LAB)/index.ipynb (stop it with Ctrl-C) ..."
	$(if $(filter 1,$(TEACH)),,JUPYTER_CONFIG_PATH=$(CURDIR)/tools/lab/students) $(BIN)/jupyter lab $(ROOT) --ServerApp.root_dir=. --LabApp.app_settings_dir=$(CURDIR)/tools/lab $(HOME_OF_LAB)/index.ipynb $(ARGS)

train: .venv/.ready ## train under (3, 1e-5)-DP: make train [PRESET=resnet20-eps3] [ARGS="--steps 3"]
	@$(HEAP) $(BIN)/dp-train $(PRESET) $(ARGS)

lint: .venv/.ready ## style (ruff.toml), spelling, and which package may import which (setup.cfg): seconds
	@$(BIN)/ruff check --quiet
	@$(BIN)/codespell nbs assignments docs README.md dp_course tools experiments benchmarks
	@$(BIN)/lint-imports --no-logo --no-cache > .venv/imports.txt || { cat .venv/imports.txt; exit 1; }

test: lint ## notebooks, tests and sync checks, offline: five minutes on two quiet cores, up to fourteen on old ones
	@echo "1/2 every notebook, without its slow cells, as nbdev_test runs it ..."
	@$(ONE) $(BIN)/python tests/run_notebooks.py
	@echo "2/2 pytest: oracles, properties, faults, and the sync checks ..."
	@$(ONE) $(BIN)/python -m pytest tests -n 2 --dist worksteal $(ARGS)

# kymatio 0.3 needs a SciPy older than ours, so it gets one of its own, beside the environment.
.venv/oracles/.ready: .venv/.ready
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target .venv/oracles kymatio==0.3.0 scipy==1.16.3 configparser appdirs
	@touch $@

test-slow: .venv/oracles/.ready ## what `make test` leaves out and a CPU can do: slow cells, slow tests, live oracles
	@echo "1/2 the slow cells of every notebook ..."
	@$(ONE) $(BIN)/nbdev_test --n_workers 2 --timing --flags slow
	@echo "2/2 the slow tests, and those that need kymatio ..."
	@$(ONE) DP_COURSE_SLOW=1 $(BIN)/python -m pytest tests -m slow -n 2 --dist worksteal $(ARGS)
	@PYTHONPATH=.venv/oracles $(BIN)/python -m pytest tests/features -k kymatio $(ARGS)

test-path: .venv/.ready ## every lesson with the installed wheel, from another folder, as a student has it (about ten minutes)
	@$(ONE) DP_COURSE_SLOW=1 $(BIN)/python -m pytest tests/house/test_student_path.py -s $(ARGS)

# nbgrader comes with the extra `teach`: it brings a gradebook (SQLAlchemy, Alembic) that students do not need.
.venv/.teach: .venv/.ready
	@echo "Installing nbgrader (a quarter of a minute, once) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev,teach]'
	@$(BIN)/python -m pip check
	@touch $@

assignments: .venv/.teach ## make the copies of the five assignments: out/assignments/student, solution, nbgrader
	@$(BIN)/python tools/assign.py $(ARGS)

grade: .venv/.teach ## grade a folder of notebooks, with roster.csv and due.csv if they are there: make grade SUBMISSIONS=dir [ARGS="--jobs 4"]; without a folder, the tables anew
	@$(BIN)/python tools/grade.py $(if $(SUBMISSIONS),"$(SUBMISSIONS)") $(ARGS)

test-teach: .venv/.teach ## the tests of the assignments that need nbgrader, and a hundred submissions (ten minutes or more)
	@$(ONE) DP_COURSE_SLOW=1 $(BIN)/python -m pytest tests/exercises/test_assignments.py $(ARGS)

# Playwright has a folder of its own beside the environment; it drives the system's Chromium.
.venv/browser/.ready: .venv/.ready
	@echo "Installing Playwright (half a minute, once) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check --target .venv/browser playwright==1.65.2
	@touch $@

chromium:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	  test "$$(id -u)" = 0 && command -v apt-get && apt-get update -qq && apt-get install -y -qq chromium; } || { \
	  echo "Chromium is missing, and only root can install it: sudo apt-get install chromium"; exit 1; }

test-browser: chromium .venv/browser/.ready ## the student's path in Chromium: JupyterLab and a lesson, pictures in out/browser (two minutes)
	@PYTHONPATH=.venv/browser DP_COURSE_BROWSER=1 $(BIN)/python -m pytest tests/house/test_browser.py $(ARGS)

notebooks: .venv/.ready ## run notebooks with a real kernel and save their outputs: make notebooks [NB=nbs/01_promise.ipynb]
	@$(BIN)/python tools/notebooks.py run $(NB)

review: .venv/.ready ## pictures without words and numbers that no output shows: make review [NB=nbs/01_promise.ipynb]
	@$(BIN)/python tools/review.py $(NB)

export: .venv/.ready ## write dp_course/ from the notebooks
	@$(BIN)/python tools/export.py

readme: .venv/.ready ## write README.md, docs and their pictures from nbs/index.ipynb and nbs/pages
	@$(BIN)/python tools/notebooks.py readme

# Sphinx and a theme, in the extra `docs`.
.venv/.docs: .venv/.ready
	@echo "Installing Sphinx (a quarter of a minute, once) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	@$(BIN)/python -m pip check
	@touch $@

docs: .venv/.docs ## build the site from the notebooks with their saved outputs: out/site/html/index.html (about a minute)
	@$(ONE) $(BIN)/python tools/pages.py

test-docs: docs chromium .venv/browser/.ready ## the site, read by a parser and by Chromium on a phone's width (two minutes)
	@PYTHONPATH=.venv/browser DP_COURSE_BROWSER=1 $(BIN)/python -m pytest tests/house/test_site.py $(ARGS)

bench: .venv/.ready ## time ratios against Opacus, torch.func and plain SGD, in one run
	@$(BIN)/python benchmarks/bench.py $(ARGS)

wheel: .venv/.ready ## build dist/*.whl
	@$(BIN)/python -m build --wheel --no-isolation

clean: ## remove build products (keeps .venv and out/)
	rm -rf build dist *.egg-info .pytest_cache .hypothesis _proc
