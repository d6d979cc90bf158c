"""Stages of `gpu_check` in the order of what they tell, each as it runs on a GPU and, in small, on a CPU.

Knows commands, limits and needs of stages; how they are run and reported is not known here.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.gpu.check_stages import Stage
from benchmarks.report import ROOT

KERNEL_TESTS = "tests/kernels/on_device"
# What services and models have to answer, on whatever device the workers find: the same files as without a GPU.
SERVICE_TESTS = ("parallel_sampling", "beam_search", "parameters")
# One test or a few for each kind of kernel: the launches of a step, against their references.
FIRST_KERNELS: dict[str, tuple[str, ...]] = {
    "decode attention": ("test_decode_attention.py::test_the_configurations_that_are_launched",),
    "prefill attention": ("test_prefill_attention.py::test_the_configurations_that_are_launched",),
    "norms, rotary, activation": (
        "test_norms.py::test_the_residual_takes_the_sum_and_the_sum_is_normalised",
        "test_rotary_write.py::test_all_dimensions_rotate",
        "test_activations.py::test_gates_far_from_zero_are_open_or_shut",
    ),
    "sampling": (
        "test_token_choice.py::test_any_mix_of_samples_gets_the_references_tokens",
        "test_logit_penalties.py::test_a_prompt_has_no_presence_and_no_frequency",
    ),
    "step inputs, block moves": (
        "test_step_inputs.py::test_tokens_and_tables_are_those_of_their_seats",
        "test_block_copy.py::test_sources_are_read_before_they_are_overwritten",
        "test_block_copy.py::test_swapped_blocks_come_back_bit_by_bit",
    ),
    "weights of 8 and 4 bits": (
        "test_quantised_products.py::test_the_devices_product_is_that_of_the_dequantised_numbers",
        "test_quantised_products.py::test_products_of_few_rows_follow_the_reference",
    ),
    "cascade attention": ("test_cascade_attention.py::test_the_configurations_that_are_launched",),
}
LEAST_GPUS_OF_GROUP = 2
# A warning of a library's other version is no failure here, and a first launch compiles.
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-s", "-o", "timeout=190")
_DURATIONS = ("--durations", "3")
_FIRST_S, _TESTS_S, _FAMILIES_S = 60, 240, 400
_DRY_LIMIT_S = 600.0
# Services wait for a start as long as their stage may take: many compile at once then, and the stage's limit decides.
_SERVICES = {"QUIRE_TEST_SLOWNESS": "4"}
_ON_CPU = {"ON_GPU_TESTS": "cpu"}
_INTERPRETER = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
_FOR_A_CPU = _ON_CPU | _INTERPRETER
_QUICK_INTERPRETER = ("-p", "tests.kernels.on_device.quick_interpreter")
_MODEL_STAGE = "random model"
_GROUP_STAGE, _GROUP_TESTS = "groups of GPUs", "tests/on_gpu/test_groups.py"
# Families answer one after another for some twenty seconds each: so many stages, side by side, have a share each.
_FAMILY_SHARES = 5
_FAMILY_TESTS, _FAMILY_SHARE = "tests/on_gpu/test_families.py", "ON_GPU_FAMILIES"
_LIBRARY_STAGE = "test_attention_libraries"
ATTENTION_LIBRARIES = {"flashinfer": "FlashInfer", "flash-attn": "FlashAttention-3"}


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Stages that run side by side, or one after another where each is to have the device for itself."""

    stages: tuple[Stage, ...]
    is_parallel: bool


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Groups of stages, one after another."""

    groups: tuple[StageGroup, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # stages that this machine cannot run, and why

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(stage for group in self.groups for stage in group.stages)

    def part(self, patterns: Sequence[str], passed: Sequence[str] = ()) -> "CheckPlan":
        """Keep the stages whose name matches a pattern (all without patterns), but those that have passed.

        What a kept stage needs is kept with it.
        """

        def is_asked(name: str) -> bool:
            return name not in passed and (not patterns or any(fnmatch(name, one) for one in patterns))

        names = {stage.name for stage in self.stages if is_asked(stage.name)}
        names |= {stage.needs for stage in self.stages if stage.name in names and stage.needs is not None}
        groups = (
            replace(group, stages=tuple(stage for stage in group.stages if stage.name in names))
            for group in self.groups
        )
        return CheckPlan(tuple(group for group in groups if group.stages), self.left_out)


def gpu_plan(
    model: Path,
    fa3_library: Path | None = None,
    num_gpus: int = LEAST_GPUS_OF_GROUP,
    libraries: Collection[str] = tuple(ATTENTION_LIBRARIES),
) -> CheckPlan:
    """Stages for a machine with GPUs.

    model:     folder of the random model of 8 B parameters, which is written once
    libraries: those of attention that are installed
    """
    return _Stages(model, fa3_library, num_gpus, libraries, is_dry=False).plan()


def dry_plan(model: Path) -> CheckPlan:
    """The same stages in small on a CPU: kernels in Triton's interpreter, workers of models and services on the CPU."""
    return _Stages(model, None, LEAST_GPUS_OF_GROUP, tuple(ATTENTION_LIBRARIES), is_dry=True).plan()


@dataclass(frozen=True, slots=True)
class _Stages:
    """Makes the stages of one kind of run."""

    model: Path
    fa3_library: Path | None
    num_gpus: int
    libraries: Collection[str]
    is_dry: bool

    def plan(self) -> CheckPlan:
        """The groups: what tells most first.

        Families come last: their workers compile for minutes on all processors, and the device takes turns among them.
        """
        # The runner's tests take longest of what remains: begun last they would be waited for alone.
        tests = (*self._groups_of_gpus(), *self._models(), *self._services(), self._runner(), *self._kernels())
        return CheckPlan(
            (
                StageGroup((self._benchmark("device", "roofline", limit_s=60),), is_parallel=False),
                StageGroup((self._first_model(), *self._first_kernels()), is_parallel=True),
                StageGroup((self._random_model(), *self._main_figures()), is_parallel=False),
                StageGroup(tests, is_parallel=True),
                StageGroup(self._other_figures(), is_parallel=False),
                StageGroup(tuple(self._families()), is_parallel=True),
            ),
            dict(self._left_out()),
        )

    def _left_out(self) -> Iterator[tuple[str, str]]:
        if not self._has_group:
            yield _GROUP_STAGE, f"needs {LEAST_GPUS_OF_GROUP} GPUs, and there is one"
        if not self.libraries:
            names = " or ".join(ATTENTION_LIBRARIES.values())
            yield f"kernels/{_LIBRARY_STAGE}", f"needs {names}, and neither is installed"

    def _first_model(self) -> Stage:
        stage = self._tests("first/model", "tests/on_gpu/test_served_streams.py", environment=_ON_CPU | _SERVICES)
        return self._limited(stage, _TESTS_S)

    def _first_kernels(self) -> Iterator[Stage]:
        for name, tests in FIRST_KERNELS.items():
            paths = (f"{KERNEL_TESTS}/{test}" for test in tests)
            yield self._limited(self._kernel_tests(f"first/{name}", *paths), _FIRST_S)

    def _random_model(self) -> Stage:
        shape = ("tiny", str(self.model), "--device", "cpu") if self.is_dry else ("8b", str(self.model))
        stage = Stage(name=_MODEL_STAGE, command=("-m", "benchmarks.random_models", *shape), limit_s=90)
        return self._limited(stage, 90)

    def _main_figures(self) -> tuple[Stage, ...]:
        return (
            self._benchmark("decode step", "decode_step", limit_s=150, least_s=45, on_model=True),
            self._kernel_speed("prefill", "prefill", limit_s=90),
            self._kernel_speed("kernel speed", "decode", "cascade", "sampling", "layers", limit_s=120),
        )

    @property
    def _has_group(self) -> bool:
        return self.num_gpus >= LEAST_GPUS_OF_GROUP

    def _groups_of_gpus(self) -> Iterator[Stage]:
        if self._has_group:
            yield self._tests(_GROUP_STAGE, _GROUP_TESTS, environment=_ON_CPU | _SERVICES)

    def _models(self) -> Iterator[Stage]:
        for path in _test_files("tests/on_gpu"):
            # Streams are the first of all; groups and families have stages of their own.
            if path.name != "test_served_streams.py" and str(path) not in (_GROUP_TESTS, _FAMILY_TESTS):
                yield self._tests(f"models/{path.stem}", str(path), environment=_ON_CPU | _SERVICES)

    def _families(self) -> Iterator[Stage]:
        for share in range(1, _FAMILY_SHARES + 1):
            environment = _ON_CPU | _SERVICES | {_FAMILY_SHARE: f"{share}/{_FAMILY_SHARES}"}
            stage = self._tests(f"families {share} of {_FAMILY_SHARES}", _FAMILY_TESTS, environment=environment)
            yield self._limited(stage, _FAMILIES_S)

    def _services(self) -> Iterator[Stage]:
        # Families have tests of their own here, which start all their workers at once.
        only = {
            "equal_outputs": "not family",
            "memory_pressure": "swapped or recomputed",
            **dict.fromkeys(SERVICE_TESTS, ""),
        }
        for name, tests in only.items():
            chosen = ("-k", tests) if tests else ()
            yield self._tests(f"services/{name}", *chosen, f"tests/e2e/test_{name}.py", environment=_SERVICES)

    def _kernels(self) -> Iterator[Stage]:
        for path in _test_files(KERNEL_TESTS):
            if path.stem == _LIBRARY_STAGE and not self.libraries:
                continue
            yield self._kernel_tests(f"kernels/{path.stem}", str(path))

    def _runner(self) -> Stage:
        return self._tests("runner", "tests/worker/device")

    def _other_figures(self) -> tuple[Stage, ...]:
        # What a second call may do last: a budget that ends meanwhile cuts none of the others.
        return (
            self._benchmark("block moves", "block_moves", limit_s=60),
            self._benchmark("swap or recompute", "swap_or_recompute", limit_s=90, on_model=True),
            self._benchmark(
                "against transformers",
                "against_transformers",
                *("--limit-s", "30"),
                limit_s=150,
                least_s=75,
                on_model=True,
            ),
            self._benchmark("attention libraries", "attention_libraries", limit_s=150, least_s=30),
            self._benchmark(
                "block sizes",
                "block_size_sweep",
                *(("--sizes", "16", "4") if self.is_dry else ("--limit-s", "60")),
                limit_s=90,
                least_s=40,
            ),
        )

    def _kernel_speed(self, name: str, *sections: str, limit_s: float) -> Stage:
        size = ("--device", "cpu") if self.is_dry else ("--device", "cuda", "--quick")
        peer = () if self.fa3_library is None else ("--fa3-library", str(self.fa3_library.resolve()))
        command = ("-m", "benchmarks.gpu.kernels", "--out", "{out}", *size, *peer, "--sections", *sections)
        environment = _INTERPRETER if self.is_dry else {}
        stage = Stage(name=name, command=command, limit_s=limit_s, least_s=30, environment=environment)
        return self._limited(stage, limit_s)

    def _benchmark(
        self, name: str, module: str, *more: str, limit_s: float, least_s: float = 10.0, on_model: bool = False
    ) -> Stage:
        """Benchmark by itself. on_model: of the large model, in a dry run of the demo model."""
        size: tuple[str, ...] = ("--device", "cpu") if self.is_dry else ("--device", "cuda")
        if self.is_dry and module != "roofline":
            size += ("--small",)
        elif on_model:
            size += ("--model", str(self.model))
        command = ("-m", f"benchmarks.gpu.{module}", "--out", "{out}", *size, *more)
        needs = _MODEL_STAGE if on_model else None
        stage = Stage(name=name, command=command, limit_s=limit_s, least_s=least_s, needs=needs)
        return self._limited(stage, limit_s)

    def _kernel_tests(self, name: str, *paths: str) -> Stage:
        plugins = _QUICK_INTERPRETER if self.is_dry else ()
        return self._tests(name, *plugins, *paths, environment=_INTERPRETER)

    def _tests(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Stage:
        """Tests in a process. What the environment says of a CPU is left out on a GPU."""
        given = environment or {}
        own = given if self.is_dry else {key: value for key, value in given.items() if key not in _FOR_A_CPU}
        command = (*_PYTEST, *_DURATIONS, *arguments)
        stage = Stage(name=name, command=command, limit_s=_TESTS_S, is_correctness=True, environment=own)
        return self._limited(stage, _TESTS_S)

    def _limited(self, stage: Stage, limit_s: float) -> Stage:
        """The stage with its limit; a dry run, on a few cores that have other things to do, only ends what hangs."""
        return replace(stage, limit_s=_DRY_LIMIT_S if self.is_dry else limit_s)


def _test_files(folder: str) -> list[Path]:
    """Test files, each for a process of its own: after an error on the device all later tests of a process fail."""
    return [path.relative_to(ROOT) for path in sorted((ROOT / folder).glob("test_*.py"))]
