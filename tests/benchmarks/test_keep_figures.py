"""Figures of a GPU check are kept by stage, as the machine wrote them, but for its folders."""

from benchmarks.gpu.keep_figures import kept, without_folders

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
