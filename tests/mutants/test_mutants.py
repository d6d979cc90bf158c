"""Faults for a mutation run: what is made of a source, which are drawn, and how one is tried."""

import json
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, drawn, possible_mutants, reason_for
from tests.mutants.operators import Mutant, is_python, mutants_of
from tests.mutants.report import Equivalent, page, summary
from tests.mutants.running import Outcome, Sandbox
from tests.mutants.targets import TARGETS, Target
from tests.patience import patient

SOURCE = '''"""A docstring with 1 < 2."""

LIMIT = 5


class Thing:
    size: int = 3

    def grow(self, by: int = 1) -> int:
        """Not 7 either."""
        assert by > 0, "words"
        log.info("grown", by=by + 1)
        if by < LIMIT and not self.is_full:
            self.size += by
            self.tell(by, self.size)
        elif self.size is None:
            raise ValueError(f"{by + 1}")
        for _ in zip((), numpy.minimum(by, 1), strict=True):
            self.seen.update(by, self.size)
            continue
        return max(self.size, 2)
'''


@pytest.mark.long
def test_what_does_not_compile_is_told_apart() -> None:
    source = "def f():\n    return 1\n"
    (mutant, *_) = mutants_of("x.py", source)
    assert is_python(mutant, source)
    broken = Mutant(path="x.py", start=0, end=3, line=1, operator="", before="def", after="d e f")
    assert not is_python(broken, source)


def test_each_operator_makes_its_faults_and_no_other() -> None:
    assert [(each.operator, each.before, each.after) for each in mutants_of("thing.py", SOURCE)] == [
        ("negated condition", "by < LIMIT and not self.is_full", "not (by < LIMIT and not self.is_full)"),
        ("comparison", "<", "<="),
        ("and/or", "and", "or"),
        ("dropped statement", "self.size += by", "pass"),
        ("arithmetic", "+=", "-="),
        ("dropped call", "self.tell(by, self.size)", "pass"),
        ("swapped arguments", "by, self.size", "self.size, by"),
        ("negated condition", "self.size is None", "not (self.size is None)"),
        ("comparison", "is", "is not"),
        ("dropped statement", 'raise ValueError(f"{by + 1}")', "pass"),
        ("swapped arguments", "(), numpy.minimum(by, 1)", "numpy.minimum(by, 1), ()"),
        ("constant", "1", "2"),
        ("dropped call", "self.seen.update(by, self.size)", "pass"),
        ("dropped statement", "continue", "pass"),
        ("min/max", "max", "min"),
        ("return None", "max(self.size, 2)", "None"),
        ("constant", "2", "3"),
    ]


def test_a_place_is_found_behind_characters_of_several_bytes() -> None:
    (mutant,) = mutants_of("x.py", "def f(a):\n    'é' ; return a\n")
    assert mutant.applied_to("def f(a):\n    'é' ; return a\n") == "def f(a):\n    'é' ; return None\n"


def test_every_fault_changes_its_file_in_one_place_and_is_python() -> None:
    for target in TARGETS:
        paths = target.source_paths(ROOT)
        assert paths, target.name
        source = (ROOT / paths[0]).read_text()
        for mutant in mutants_of(paths[0], source):
            assert mutant.applied_to(source) != source
            assert is_python(mutant, source)
            assert source.splitlines()[mutant.line - 1].find(mutant.before.splitlines()[0]) >= 0


@pytest.mark.long
def test_every_target_has_tests_and_those_that_import_the_module_come_first() -> None:
    for target in TARGETS:
        for source in target.source_paths(ROOT):
            tests, num_near = target.test_paths(ROOT, source)
            assert 0 < num_near < len(tests) == len(set(tests)), source
    tests, num_near = TARGETS[0].test_paths(ROOT, "scheduler_svc/core/waiting_queue.py")
    assert "tests/scheduler/test_waiting_queue.py" in tests[:num_near]


def test_a_new_test_of_a_module_is_related_to_it_and_to_no_other_by_its_import_or_its_name(tmp_path: Path) -> None:
    target = Target(name="a", sources=("a/*.py",), tests=("tests/test_old.py",))
    (tmp_path / "tests").mkdir()
    for name, line in [("old", ""), ("ones", "from a.one import f"), ("three_parts", ""), ("rest", "import a.onely")]:
        (tmp_path / f"tests/test_{name}.py").write_text(f"{line}\n")
    assert target.test_paths(tmp_path, "a/one.py") == (["tests/test_ones.py", "tests/test_old.py"], 1)
    assert target.test_paths(tmp_path, "a/three.py") == (["tests/test_three_parts.py", "tests/test_old.py"], 1)
    assert target.test_paths(tmp_path, "a/four.py") == (["tests/test_old.py"], 0)


def test_a_seed_draws_the_same_faults_again_and_another_one_others() -> None:
    possible = possible_mutants(ROOT)
    assert drawn(possible, 3, 50) == drawn(possible, 3, 50)
    assert drawn(possible, 3, 50) != drawn(possible, 4, 50)
    assert len(set(drawn(possible, 3, 50))) == 50


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """One function and its tests, of which none looks at 0."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "sums.py").write_text(
        "def total(up_to):\n"
        "    found = 0\n"
        "    while up_to > 0:\n"
        "        found += up_to\n"
        "        up_to -= 1\n"
        "    return found\n"
    )
    (folder / "test_sums.py").write_text(
        "import pytest\n"
        "from sums import total\n\n"
        "@pytest.mark.parametrize('number', [3], ids=['the third one'])\n"
        "def test_it(number): assert total(number) == 6\n"
    )
    return folder


def tried(project: Path, tmp_path: Path, operator: str, before: str, limit_s: float) -> Outcome:
    source = (project / "sums.py").read_text()
    mutant = next(m for m in mutants_of("sums.py", source) if (m.operator, m.before) == (operator, before))
    sandbox = Sandbox(project, tmp_path / "copy")
    outcome = sandbox.try_mutant(mutant, ["test_sums.py"], limit_s)
    assert (sandbox.root / "sums.py").read_text() == source == (project / "sums.py").read_text()
    return outcome


def test_a_fault_that_a_test_sees_is_found_by_that_test(project: Path, tmp_path: Path) -> None:
    outcome = tried(project, tmp_path, "arithmetic", "+=", patient(60))
    assert (outcome.status, outcome.found_by) == ("found", "test_sums.py::test_it[the third one]")


def test_a_line_of_a_log_is_no_test(project: Path, tmp_path: Path) -> None:
    file = project / "test_sums.py"
    logs_first = "def test_it(number): logging.getLogger('common.rpc').error('call failed'); "
    file.write_text("import logging\n" + file.read_text().replace("def test_it(number): ", logs_first))
    outcome = tried(project, tmp_path, "arithmetic", "+=", patient(60))
    assert (outcome.status, outcome.found_by) == ("found", "test_sums.py::test_it[the third one]")


def test_a_fault_that_only_a_far_test_sees_is_found(project: Path, tmp_path: Path) -> None:
    (project / "test_near.py").write_text("def test_nothing(): pass\n")
    source = (project / "sums.py").read_text()
    mutant = next(each for each in mutants_of("sums.py", source) if each.before == "+=")
    sandbox = Sandbox(project, tmp_path / "copy")
    outcome = sandbox.try_mutant(mutant, ["test_near.py", "test_sums.py"], patient(60), num_near=1)
    assert (outcome.status, outcome.found_by) == ("found", "test_sums.py::test_it[the third one]")


def test_a_fault_that_no_test_sees_survives(project: Path, tmp_path: Path) -> None:
    outcome = tried(project, tmp_path, "comparison", ">", patient(60))  # total(0) is 0 in both
    assert (outcome.status, outcome.found_by) == ("survived", "")


def test_a_fault_that_never_ends_is_ended(project: Path, tmp_path: Path) -> None:
    assert tried(project, tmp_path, "dropped statement", "up_to -= 1", 5.0).status == "timed out"


def test_a_test_that_fails_without_the_fault_too_finds_nothing(project: Path, tmp_path: Path) -> None:
    with (project / "test_sums.py").open("a") as file:
        file.write("\ndef test_never(): assert False\n")
    outcome = tried(project, tmp_path, "comparison", ">", patient(60))
    assert (outcome.status, outcome.found_by) == ("unconfirmed", "test_sums.py::test_never")


def test_tests_that_cannot_be_run_are_no_find(project: Path, tmp_path: Path) -> None:
    (mutant, *_) = mutants_of("sums.py", (project / "sums.py").read_text())
    with pytest.raises(RuntimeError, match="cannot be run"):
        Sandbox(project, tmp_path / "copy").try_mutant(mutant, ["no_such_test.py"], patient(60))


def outcome_of(status: str, line: int = 1) -> Outcome:
    mutant = Mutant(path="sums.py", start=0, end=1, line=line, operator="comparison", before="|", after="!=")
    return Outcome(mutant=mutant, status=status, found_by="", seconds=1.0)  # type: ignore[arg-type]


def test_equivalent_faults_do_not_count_and_every_survivor_is_on_the_page() -> None:
    outcomes = [outcome_of("found"), outcome_of("timed out"), outcome_of("survived", 7), outcome_of("survived", 8)]
    facts = {"seed": 1, "num_possible": 99, "date": "2026-01-01", "num_cpus": 2}
    run = summary(outcomes, ["a", "a", "a", "b"], ["", "", "", "never asked"], facts)
    assert run["score"] == {"tried": 4, "equivalent": 1, "found": 2, "part": 0.6667}
    assert run["by_target"]["b"]["part"] is None
    text = page(run)
    assert "| `sums.py:7` | comparison: `\\|` → `!=` | **no test finds it** |" in text
    assert "| `sums.py:8` | comparison: `\\|` → `!=` | equivalent: never asked |" in text


def test_an_argument_holds_for_its_own_place_and_for_survivors_alone(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("while a | b:\n")
    argued = [Equivalent(path="sums.py", before="|", after="!=", context="while a", reason="why")]
    assert reason_for(outcome_of("survived"), argued, tmp_path) == "why"
    assert reason_for(outcome_of("found"), argued, tmp_path) == ""
    (tmp_path / "sums.py").write_text("if a | b:\n")
    assert reason_for(outcome_of("survived"), argued, tmp_path) == ""


def test_every_argument_is_about_a_fault_that_there_is() -> None:
    for each in json.loads((ROOT / "tests/mutants/equivalents.json").read_text()):
        source = (ROOT / each["path"]).read_text()
        lines = source.splitlines()
        assert any(
            (mutant.before, mutant.after) == (each["before"], each["after"])
            and each["context"] in lines[mutant.line - 1]
            for mutant in mutants_of(each["path"], source)
        ), each
        assert each["reason"]
