# Everything a newcomer needs is `make demo` and `make test`; both set up .venv themselves.
#
# Variables:
#   PYTHON       interpreter for the virtual environment (3.11 or later). Default: python3.
#   TORCH_INDEX  package index to take torch from, e.g. PyTorch's index of CPU builds (hundreds of megabytes instead
#                of gigabytes). Default: empty, pip's own configuration.
#   SERVE_ARGS   arguments of `quire serve`, for `make serve`. Default: the demo model.
#   OUT          folder of the report, for `make gpu-check`.
#   GPU_CHECK_ARGS  more of its arguments, such as --only 'kernels/*'. Default: empty, all stages.
#   TEST_PROCESSES  how many of them `make test` runs side by side. Default: 3; on two cores they wait half of their time.
#   BENCH_PEERS_ARGS  arguments of `make bench-peers`, such as --model 8m --resume. Default: empty, the model of the targets.
#   SECONDS      how long `make endurance` goes on. Default: 1800.
#   SEED         what draws the inputs of `make endurance` and `make fuzz`. Default: 1.
#   FUZZ_SHARE   part of all inputs that `make fuzz` plays. Default: 1.0.
#   MUTANTS_ARGS arguments of `make mutants`, such as --num 40 --seed 2 --jobs 2. Default: empty, 400 faults.
#   SEEDS        how many seeds `make simulate` runs, from 0 on. Default: 20000.

PYTHON ?= python3
TORCH_INDEX ?=
VENV ?= .venv
SERVE_ARGS ?= demo/model
GPU_CHECK_ARGS ?=
BENCH_PEERS_ARGS ?=
MUTANTS_ARGS ?=
SEEDS ?= 20000
FUZZ_SHARE ?= 1.0
SECONDS ?= 1800
SEED ?= 1
TEST_PROCESSES ?= 3
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
PROTOS := $(patsubst protos/%,%,$(wildcard protos/quire/v1/*.proto))
CODE := common kernels quire scheduler_svc worker_svc benchmarks demo tests hatch_build.py

.PHONY: demo serve test coverage check kernels-gate launches-gate gpu-check format protos protos-release files-page bench bench-paper bench-peers results-page soak chaos fuzz endurance simulate mutants compose-smoke clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.run
	$(BIN)/python -m demo.run

serve: $(VENV)/.run
	$(BIN)/quire serve $(SERVE_ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --durations=30 --durations-min=5

# The same with tracing, which makes it half as long again.
coverage: $(VENV)/.dev
	$(BIN)/python -m coverage erase
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --cov --cov-report=
	$(BIN)/python -m coverage report --skip-covered --include='scheduler_svc/*,common/*,quire/*' --fail-under=85

check: $(VENV)/.dev kernels-gate
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports
	$(BIN)/python -m tests.docstring_openings
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/release.binpb
	$(BIN)/python -m pytest -q tests/test_protos.py
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml

# Needs no GPU: compiles every kernel for some, and looks at the machine code.
kernels-gate: $(VENV)/.dev
	$(BIN)/python -m kernels.gate.compile_gate

# The same of all that a worker launches as it starts, exactly as it launches it; `make test` holds both to the same types.
launches-gate: $(VENV)/.dev
	$(BIN)/python -m tests.worker.device.launch_gate

# For a machine with one NVIDIA GPU: uses $(PYTHON) and what it has, installs nothing, needs no network.
gpu-check:
	$(if $(OUT),,$(error gpu-check puts its report into a folder: make gpu-check OUT=folder))
	$(PYTHON) -m benchmarks.gpu.gpu_check --out $(OUT) $(GPU_CHECK_ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

protos: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

# The wire as of this release, which `make check` compares with: for the commit of a release alone.
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

# The figures of the paper's evaluation, in virtual time: docs/paper.md and its plots. Some minutes.
bench-paper: $(VENV)/.dev
	$(BIN)/python -m benchmarks.paper
	$(BIN)/python -m benchmarks.results_page

# Beside other engines on this CPU, each installed into an environment of its own: gigabytes, and about an hour.
bench-peers: $(VENV)/.dev
	$(BIN)/python -m benchmarks.peers $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(BENCH_PEERS_ARGS)
	$(BIN)/python -m benchmarks.results_page

# docs/files.md again, from the first sentence of each file.
files-page: $(VENV)/.dev
	$(BIN)/python -m tests.files_page

# docs/results.md again, from all result files as they are. Measures nothing.
results-page: $(VENV)/.dev
	$(BIN)/python -m benchmarks.results_page

# The memory manager under long random loads: the core alone, the core on real KV, and real services. About an hour.
soak: $(VENV)/.dev
	MEMORY_TEST_EXAMPLES=6000 MEMORY_TEST_LOADS=600 MEMORY_TEST_SEEDS=25 $(BIN)/python -m pytest -q -o timeout=0 tests/memory
	$(BIN)/python -m tests.e2e.pressure_soak --rounds 50 --seed 1

# The fault matrix against real processes, and a report of it.
chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos

# Half an hour of faults on real processes, one every 3 s, drawn by SEED.
endurance: $(VENV)/.dev
	$(BIN)/python -m tests.chaos --campaign endurance --seconds $(SECONDS) --seed $(SEED)

# Hostile answers of a worker and damaged model folders, each kind; then, from a seed and against real processes,
# messages over every RPC, abuse of HTTP/2 and more model folders.
fuzz: $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/scheduler/test_hostile_answers.py tests/worker/test_damaged_folders.py
	$(BIN)/python -m tests.fuzz --share $(FUZZ_SHARE) --seed $(SEED)

# Scheduler, journal and workers in one loop with virtual time and injected faults, seed after seed.
simulate: $(VENV)/.dev
	$(BIN)/python -m tests.simulation --seeds 0:$(SEEDS)

# Faults in the code, drawn with a seed and tried one at a time in a copy: docs/mutants.md. Hours; see MUTANTS_ARGS.
mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

# Needs podman, podman-compose and debootstrap where there is no Docker engine; see CONTRIBUTING.md.
compose-smoke: $(VENV)/.dev
	$(BIN)/python -m tests.compose_smoke

clean:
	rm -rf $(VENV) .quire build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, so that nothing else decides where it comes from.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.run: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -c constraints.txt -e '.[cli,scheduler,worker,embedded]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.run
