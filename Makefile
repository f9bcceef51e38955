# Every command works alone on a fresh tree: it installs and builds its dependencies first.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev server build test test-deep test-rl check demo demo-rl assets serve docs lint format sanitize fuzz wheel image bundle bench clean

PYTHON := .venv/bin/python
MODEL ?= .cache/models/SmolLM2-135M-Instruct
SAN ?= address
UNIT ?=
ROOM ?=
SECONDS_EACH ?= 600
ARGS ?=
URL ?=

help: ## this list
	@echo "dorad: one base model, many DoRA adapters, one batch"
	@echo
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Logs of every stage: build/logs. docs/development.md says more."

setup: ## install missing system packages and .venv
	@tools/setup.sh

setup-dev: ## setup, and the tools of lint, format and fuzzing
	@tools/setup.sh --dev

server: setup ## build/dorad and the Python client
	@tools/client.sh
	@tools/build.sh build dorad

build: setup ## the same, and the unit tests
	@tools/client.sh
	@tools/build.sh build

test: build ## all tests but the long ones; ARGS goes to pytest (ARGS="-k score")
	@tools/test.sh $(ARGS)

test-deep: build ## all tests, the long ones at full length
	@DORAD_DEEP=1 tools/test.sh $(ARGS)

test-rl: build ## packages with environments of their own: RL libraries, bitsandbytes; ARGS goes to pytest
	@tools/test_rl.sh $(ARGS)

check: setup ## one room's unit and smoke tests: ROOM=engine
	@tools/client.sh
	@tools/check.sh "$(ROOM)"

assets: setup ## the demo's model and adapters, in .cache
	@$(PYTHON) demo/train_adapters.py

demo: setup ## a real model and two DoRA adapters in one batch, with a hot load
	@tools/demo.sh $(ARGS)

demo-rl: server ## a GRPO loop: sample, train and publish a DoRA policy, step after step
	@$(PYTHON) demo/convert_smollm2.py
	@$(PYTHON) client/examples/grpo.py $(ARGS)

serve: server ## run the server: MODEL=folder ARGS="--adapter name=folder"
	@[[ "$(MODEL)" != .cache/models/SmolLM2-135M-Instruct ]] || $(PYTHON) demo/convert_smollm2.py
	@exec env OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive build/dorad serve --model "$(MODEL)" $(ARGS)

docs: ## the documentation as a site in build/site; ARGS=--serve shows it
	@tools/docs.sh $(ARGS)

lint: setup-dev ## clang-format, clang-tidy, ruff, mypy and the proto rules
	@tools/client.sh
	@tools/lint.sh

format: setup-dev ## rewrite sources in the project's format
	@tools/format.sh

sanitize: setup ## unit tests under SAN=address (with undefined behaviour) or thread; UNIT=rooms: some
	@tools/sanitize.sh $(SAN) '$(UNIT)'

fuzz: setup-dev ## the fuzz targets, SECONDS_EACH=600
	@tools/client.sh
	@tools/fuzz.sh $(SECONDS_EACH)

wheel: server ## the Python packages dorad (client) and dorad-server, in dist; URL=repository's address
	@DORAD_URL="$(URL)" tools/wheel.sh

image: ## container images of the server, the gateway and nginx; needs docker
	@tools/image.sh $(ARGS)

bundle: build ## dist/dorad-bundle.tar.xz for GPU hosts
	@tools/bundle.sh

bench: build assets ## benchmarks against peers; prints ratios
	@tools/bench.sh $(ARGS)

clean: ## remove build folders (keeps .venv and .cache)
	@rm -rf build build-{debug,asan,tsan,fuzz} compile_commands.json
