"""Targets of mutation, and the tests related to them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LEAST_NEAR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Sources and the tests that are to find faults in them, both as globs from the root of the project."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]

    def source_paths(self, root: Path) -> list[str]:
        """List its files, in order."""
        return _paths(root, self.sources)

    def test_paths(self, root: Path, source_path: str) -> tuple[list[str], int]:
        """List a file's tests, and the number of the nearest ones, which come first, since they find most faults soon.

        Near are those that import the module or are named after it, whether or not a glob of the target names them, if
        they stand beside tests that one does; else the first few.
        """
        module = source_path.removesuffix(".py").replace("/", ".")
        imports = re.compile(rf"^(from|import) {re.escape(module)}\b", re.MULTILINE)
        stem = Path(source_path).stem
        named = _paths(root, self.tests)
        beside = _paths(root, dict.fromkeys(f"{Path(each).parent.as_posix()}/test_*.py" for each in self.tests))
        near: list[str] = []
        far: list[str] = []
        for path in dict.fromkeys([*named, *beside]):
            is_near = stem in Path(path).stem or imports.search((root / path).read_text()) is not None
            if is_near:
                near.append(path)
            elif path in named:
                far.append(path)
        tests = near + far
        return tests, min(len(tests) - 1, max(len(near), _LEAST_NEAR))


TARGETS = (
    Target(
        name="scheduler_svc/core",
        sources=("scheduler_svc/core/*.py",),
        tests=(
            "tests/scheduler/test_scheduler_*.py",
            "tests/scheduler/test_block_manager.py",
            "tests/scheduler/test_beam_search*.py",
            "tests/scheduler/test_sequence.py",
            "tests/scheduler/test_tails.py",
            "tests/scheduler/test_forced_tokens.py",
            "tests/scheduler/test_group_state.py",
            "tests/scheduler/test_recovery_parts.py",
            "tests/scheduler/test_waiting_*.py",
            "tests/memory/test_memory_properties.py",
            "tests/memory/test_failed_steps.py",
            "tests/memory/test_no_deadlock.py",
        ),
    ),
    Target(
        name="scheduler_svc/requests",
        sources=("scheduler_svc/requests/*.py", "scheduler_svc/requests/*/*.py"),
        tests=("tests/scheduler/test_[!s]*.py", "tests/scheduler/test_s[!ct]*.py", "tests/scheduler/test_st[!a]*.py"),
    ),
    Target(
        name="scheduler_svc/journal",
        sources=("scheduler_svc/journal/*.py",),
        tests=(
            "tests/scheduler/test_cluster_link*.py",
            "tests/scheduler/test_cluster_store.py",
            "tests/scheduler/test_journal*.py",
            "tests/scheduler/test_record*.py",
            "tests/scheduler/test_redis_*.py",
            "tests/scheduler/test_restate*.py",
            "tests/scheduler/test_begun_replays.py",
            "tests/scheduler/test_leases.py",
            "tests/scheduler/test_replica_wait.py",
            "tests/scheduler/test_shard_*.py",
            "tests/scheduler/test_slot_map.py",
            "tests/scheduler/test_store*.py",
            "tests/scheduler/test_durable_answers.py",
            "tests/scheduler/test_recovery*.py",
            "tests/scheduler/test_standby*.py",
            "tests/scheduler/test_stale_epochs.py",
            "tests/scheduler/test_take_over.py",
        ),
    ),
    Target(
        name="worker_svc seats and steps",
        sources=(
            "worker_svc/steps/seat_table.py",
            "worker_svc/steps/step_*.py",
            "worker_svc/steps/fetched_blocks.py",
            "worker_svc/steps/pool_reader.py",
            "worker_svc/cpu/batch_builder.py",
            "worker_svc/sampling/candidates.py",
            "worker_svc/cpu/runner.py",
            "worker_svc/steps/trial_steps.py",
            "worker_svc/steps/executor.py",
        ),
        tests=(
            "tests/worker/test_seat_table.py",
            "tests/worker/test_step_*.py",
            "tests/worker/test_trial_steps.py",
            "tests/worker/test_batch_builder.py",
            "tests/worker/test_candidates.py",
            "tests/worker/test_executor*.py",
            "tests/worker/test_runner.py",
            "tests/worker/test_runner_*.py",
            "tests/worker/test_servicer.py",
            "tests/worker/test_fetched_blocks.py",
            "tests/worker/test_pool_blocks_travel.py",
            "tests/worker/device/test_step_upload.py",
        ),
    ),
)


def _paths(root: Path, globs: Iterable[str]) -> list[str]:
    found = (path.relative_to(root).as_posix() for each in globs for path in sorted(root.glob(each)))
    return [path for path in dict.fromkeys(found) if not path.endswith("__init__.py")]
