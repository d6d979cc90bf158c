# Start with `make demo` and `make test`; both set up .venv.
#
# Variables:
#   PYTHON       interpreter for the virtual environment (3.11 or later). Default: python3.
#   TORCH_INDEX  package index for torch, e.g. PyTorch's index of CPU builds (hundreds of megabytes instead of
#                gigabytes). Default: empty, pip's own configuration.
#   SERVE_ARGS   arguments of `quire serve`, for `make serve`. Default: the demo model.
#   OUT          folder of the report, for `make gpu-check`, and for its dry run (default there: .quire/gpu-check-dry-run).
#   GPU_CHECK_ARGS  more arguments of `make gpu-check`, such as --only 'kernels/*' or --resume. Default: empty, all stages.
#   TEST_PROCESSES  number of processes of `make test` and its kin. Default: 3, also for two cores, since tests wait half of the time.
#   DEVICE_RUNNER_TESTS  tests that `make test-device-runner` runs. Default: all that start workers.
#   NEWEST_TESTS  tests that `make test-newest` runs. Default: end to end, of the SDK, the gateway and both services' edges.
#   STALLED_TESTS  tests that `make test-stalled` runs. Default: most of those that start services.
#   BENCH_PEERS_ARGS  arguments of `make bench-peers`, such as --model 8m --resume. Default: empty, the model of the targets.
#   SECONDS      duration of `make endurance`. Default: 1800.
#   SEED         seed of the inputs of `make endurance`, `make chaos-ranks`, `make fuzz`, `make structured` and `make test-stalled`. Default: 1.
#   FUZZ_SHARE   part of all inputs that `make fuzz` sends. Default: 1.0.
#   FUZZ_ARGS    more arguments of `make fuzz`, such as --record, which keeps the result. Default: empty.
#   SCHEMATHESIS_ARGS arguments of `make schemathesis`, such as --examples 20000 --seed 2. Default: --record.
#   LM_EVAL_ARGS arguments of `make lm-eval`, such as --items 20. Default: --record.
#   MUTANTS_ARGS arguments of `make mutants`, such as --num 40 --seed 2 --jobs 2. Default: empty, 400 faults.
#   SCALE_ARGS   arguments of `make compose-scale`, such as processes --record. Default: empty.
#   SUITE        checkout of the compliance suite, for `make open-responses`.
#   SEEDS        number of seeds that `make simulate` runs, from 0 on. Default: 20000.

PYTHON ?= python3
TORCH_INDEX ?=
VENV ?= .venv
SERVE_ARGS ?= demo/model
GPU_CHECK_ARGS ?=
BENCH_PEERS_ARGS ?=
MUTANTS_ARGS ?=
SCALE_ARGS ?=
SEEDS ?= 20000
FUZZ_SHARE ?= 1.0
FUZZ_ARGS ?=
SCHEMATHESIS_ARGS ?= --record
LM_EVAL_ARGS ?= --record
SECONDS ?= 1800
SEED ?= 1
TEST_PROCESSES ?= 3
DEVICE_RUNNER_TESTS ?= tests/e2e tests/gateway tests/chaos/test_quick.py $(wildcard tests/quire/test_serve*.py) tests/quire/test_several_servers.py
NEWEST_TESTS ?= tests/e2e tests/gateway tests/quire tests/test_rpc.py tests/test_every_rpc.py tests/worker/test_servicer.py tests/worker/test_block_travel.py
STALLED_TESTS ?= tests/e2e tests/gateway tests/quire tests/scheduler
BIN := $(VENV)/bin
NEWEST := .quire/newest
PIP := $(BIN)/pip --disable-pip-version-check -q
PROTOS := $(patsubst protos/%,%,$(wildcard protos/quire/v1/*.proto))
RUN_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal
CODE := common gateway_svc kernels quire scheduler_svc worker_svc benchmarks demo tests hatch_build.py

# Compile each module once, not at every start of a service, whatever a container's environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-long test-device-runner test-newest test-stalled coverage check kernels-gate launches-gate gpu-check gpu-check-dry-run format protos protos-release files-page bench bench-fleet bench-paper bench-peers results-page soak chaos chaos-ranks fuzz schemathesis lm-eval endurance structured simulate mutants open-responses compose-smoke compose-scale clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.run
	$(BIN)/python -m demo.run

serve: $(VENV)/.run
	$(BIN)/quire serve $(SERVE_ARGS)

test: $(VENV)/.dev
	$(RUN_TESTS) -m 'not long' --durations=30 --durations-min=5

# The tests that take the most processor time: kernels in Triton's interpreter, the wheel, benchmarks in small, long searches.
test-long: $(VENV)/.dev
	$(RUN_TESTS) -m long --durations=30 --durations-min=20

# The tests that start real services, with every worker on the runner of accelerators, on a CPU: DEVICE_RUNNER_TESTS.
test-device-runner: $(VENV)/.dev
	$(RUN_TESTS) -p tests.device_runner $(DEVICE_RUNNER_TESTS)

# The tests that start services, with the newest releases that pyproject.toml allows, as `pip install` takes them.
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	grep '^torch==' constraints.txt > $(NEWEST)/torch.txt
	$(NEWEST)/bin/pip --disable-pip-version-check -q install -c $(NEWEST)/torch.txt \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(NEWEST)/bin/pip --disable-pip-version-check -q install -c $(NEWEST)/torch.txt -e '.[test]'
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -W default $(NEWEST_TESTS)

# The tests that start real processes, while random ones of them stand still: what only a busy machine shows, rarely.
test-stalled: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stalled_processes --seed $(SEED) \
	  $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(STALLED_TESTS)

# All tests with tracing, which takes half as long again.
coverage: $(VENV)/.dev
	$(BIN)/python -m coverage erase
	$(RUN_TESTS) --cov --cov-report=
	$(BIN)/python -m coverage report --skip-covered --include='scheduler_svc/*,gateway_svc/*,common/*,quire/*' --fail-under=85

check: $(VENV)/.dev kernels-gate
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports
	$(BIN)/python -m tests.docstring_openings
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/release.binpb
	$(BIN)/python -m pytest -q tests/test_protos.py tests/benchmarks/test_claims.py
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml compose.tls.yaml

# Compiles every Triton kernel for some GPUs and checks the machine code; needs no GPU.
kernels-gate: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gpu.gate.compile_gate

# The same for every launch at a worker's start, with the same arguments; `make test` checks that both use the same types.
launches-gate: $(VENV)/.dev
	$(BIN)/python -m tests.worker.device.launch_gate

# For a machine with one NVIDIA GPU: uses $(PYTHON) with its packages, installs nothing, needs no network.
gpu-check:
	$(if $(OUT),,$(error gpu-check puts its report into a folder: make gpu-check OUT=folder))
	$(PYTHON) -m benchmarks.gpu.gpu_check --out $(OUT) $(GPU_CHECK_ARGS)

# Every stage of `gpu-check` in small on a CPU: kernels in Triton's interpreter, services with workers on the CPU.
gpu-check-dry-run: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gpu.gpu_check --out $(or $(OUT),.quire/gpu-check-dry-run) --dry-run $(GPU_CHECK_ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

protos: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

# Records the wire of this release, which `make check` compares with. Only for the commit of a release.
protos-release: $(VENV)/.dev
	$(BIN)/buf build --exclude-source-info -o protos/release.binpb

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.durability.journal_cost
	$(BIN)/python -m benchmarks.durability.durability_cost
	$(BIN)/python -m benchmarks.durability.recovery_time
	$(BIN)/python -m benchmarks.durability.failover_time
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.scale.schedule_cost
	$(BIN)/python -m benchmarks.memory.kv_utilisation
	$(BIN)/python -m benchmarks.memory.memory_saving
	$(BIN)/python -m benchmarks.memory.prefix_reuse
	$(BIN)/python -m benchmarks.cpu.accuracy
	$(BIN)/python -m benchmarks.results_page

# Figures of the paper's evaluation in virtual time: docs/paper.md and its plots. Some minutes.
bench-paper: $(VENV)/.dev
	$(BIN)/python -m benchmarks.paper
	$(BIN)/python -m benchmarks.results_page

# Fleets of up to 1,000 workers in virtual time: docs/scaling.md and its plots. Some minutes.
bench-fleet: $(VENV)/.dev
	$(BIN)/python -m benchmarks.fleet
	$(BIN)/python -m benchmarks.results_page

# Comparison with other engines on this CPU, each in an environment of its own: gigabytes, and about an hour.
bench-peers: $(VENV)/.dev
	$(BIN)/python -m benchmarks.peers $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(BENCH_PEERS_ARGS)
	$(BIN)/python -m benchmarks.results_page

# Regenerates docs/files.md from the first sentence of each file.
files-page: $(VENV)/.dev
	$(BIN)/python -m tests.files_page

# Regenerates docs/results.md from the result files. Measures nothing.
results-page: $(VENV)/.dev
	$(BIN)/python -m benchmarks.results_page

# The memory manager under long random loads: the core alone, the core on real KV, and real services. About an hour.
soak: $(VENV)/.dev
	MEMORY_TEST_EXAMPLES=6000 MEMORY_TEST_LOADS=600 MEMORY_TEST_SEEDS=25 $(BIN)/python -m pytest -q -o timeout=0 tests/memory
	$(BIN)/python -m tests.e2e.pressure_soak --rounds 50 --seed 1

# Runs the fault matrix against real processes and writes its report.
chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos

# Kills any rank of two tensor-parallel workers, at 30 random moments that are drawn with SEED.
chaos-ranks: $(VENV)/.dev
	$(BIN)/python -m tests.chaos --campaign ranks --seconds 0 --seed $(SEED)

# Half an hour of faults in real processes, one every 3 s, drawn with SEED.
endurance: $(VENV)/.dev
	$(BIN)/python -m tests.chaos --campaign endurance --seconds $(SECONDS) --seed $(SEED)

# Each kind of hostile worker answers and damaged model folders; then, drawn with SEED, against real processes:
# messages over every RPC, abuse of HTTP/2, and more model folders.
fuzz: $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/scheduler/test_hostile_answers.py tests/worker/test_damaged_folders.py
	$(BIN)/python -m tests.fuzz --share $(FUZZ_SHARE) --seed $(SEED) $(FUZZ_ARGS)

# Schemathesis over every operation of /openapi.json, against real services. Installs it; about three minutes.
schemathesis: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[schemathesis]'
	$(BIN)/python -m tests.openapi $(SCHEMATHESIS_ARGS)

# EleutherAI's harness through the gateway, and with the model in its process: equal scores. Installs it; some minutes.
lm-eval: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[lm-eval]'
	$(BIN)/python -m tests.evaluation $(LM_EVAL_ARGS)

# Random JSON schemas, expressions and choices, drawn with SEED: each output checked, a third again under kills.
structured: $(VENV)/.dev
	$(BIN)/python -m tests.structured --seed $(SEED)

# Scheduler, journal and workers in one loop with virtual time and injected faults, seed after seed.
simulate: $(VENV)/.dev
	$(BIN)/python -m tests.simulation --seeds 0:$(SEEDS)

# Mutation tests: faults drawn with a seed, one at a time in a copy of the code: docs/mutants.md. Hours; see MUTANTS_ARGS.
mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

# The compliance suite of Open Responses, checked out in SUITE, against real processes. Needs bun; see docs/responses.md.
open-responses: $(VENV)/.dev
	$(if $(SUITE),,$(error open-responses runs a checkout of the suite: make open-responses SUITE=folder))
	$(BIN)/python -m tests.open_responses $(SUITE)

# Needs podman, podman-compose and debootstrap where there is no Docker engine; see CONTRIBUTING.md.
compose-smoke: $(VENV)/.dev
	$(BIN)/python -m tests.compose_smoke

# Workers 1 → 4 → 1 and schedulers 1 → 3 → 1 while streams are read: in containers, as compose-smoke; and as processes.
compose-scale: $(VENV)/.dev
	$(BIN)/python -m tests.scaling $(SCALE_ARGS)

clean:
	rm -rf $(VENV) .quire build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*

# pip comes last: an environment that was not finished, for want of python3-venv for example, is gone on with.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit("Quire needs Python 3.11 or later, and $(PYTHON) is %d.%d: name another with PYTHON=" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch is installed first and alone, so that no other package decides its index.
$(VENV)/.torch: constraints.txt | $(BIN)/pip
	@echo "Installing PyTorch: several gigabytes, unless TORCH_INDEX=URL names an index of CPU builds. Minutes, once."
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.run: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -c constraints.txt -e '.[cli,scheduler,worker,gateway,embedded]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.run
