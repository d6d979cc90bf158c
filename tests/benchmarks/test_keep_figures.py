"""Figures of a GPU check are kept by stage, as the machine wrote them, but for its folders."""

from benchmarks.gpu.keep_figures import kept, outcomes, section_of, without_folders

REPORT = {
    "stages": [
        {"name": "prefill", "results": {"kernels.json": {"benchmark": "kernels", "commit": "a-dirty", "rows": [1]}}},
        {"name": "kernel speed", "results": {"kernels.json": {"benchmark": "kernels", "commit": "a-dirty"}}},
        {"name": "kernels/test_norms", "results": {}},
    ]
}


def test_each_stage_has_a_file_of_its_own() -> None:
    assert dict(kept(REPORT, [], None)) == {
        "prefill.json": {"benchmark": "kernels", "commit": "a-dirty", "rows": [1]},
        "kernel_speed.json": {"benchmark": "kernels", "commit": "a-dirty"},
    }
    assert dict(kept(REPORT, ["prefill"], "b")) == {
        "prefill.json": {"benchmark": "kernels", "commit": "b", "rows": [1]}
    }


def test_only_folders_of_the_machine_are_left_out() -> None:
    words = {
        "command": "python3 -m a.b --model /dev/shm/check-x_1/model --fa3-library /tmp/fa3.so",
        "rows": [{"unit": "GB/s", "note": "blocks of 16 / contiguous, see https://a.org/b/c", "value": 1.5}],
        "model": "relative/model",
    }
    assert without_folders(words) == {**words, "command": "python3 -m a.b --model model --fa3-library fa3.so"}


def test_outcomes_say_what_passed_failed_and_was_not_begun() -> None:
    stages = [
        {"name": "kernels/test_norms", "status": "passed", "seconds": 1.5, "key_figures": {"passed": 3}, "tail": ""},
        {"name": "runner", "status": "timed out", "seconds": 240.0, "key_figures": {"passed": 4, "failed": 1}},
        {"name": "device", "status": "passed", "seconds": 2.0, "key_figures": {"read_gb_per_s": 5.0}},
        {"name": "block moves", "status": "skipped", "seconds": 0.0, "key_figures": {}},
    ]
    said = dict.fromkeys(("began", "is_complete", "is_correct", "left_out", "grpc_experiments", "versions", "machine"))
    report = {**said, "command": "python -m x --fa3-library /tmp/fa3.so", "commit": "a", "stages": stages}
    document = outcomes(report, "b")
    assert document["command"] == "python -m x --fa3-library fa3.so" and document["commit"] == "b"
    section = section_of({**document, "is_correct": False, "is_complete": True})
    assert section.verdict == "**1 of 2 not met**"
    assert [each.figure for each in section.headlines] == [
        "7 tests passed, 1 failed",
        "out of time: runner",
        "not begun: block moves",
    ]
    assert "| runner | timed out | 240.0 | 4 |" in section.blocks[0]
