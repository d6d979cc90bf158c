"""Comparison with peers, without peers: the protocol with a scripted runner, order, figures, output."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.campaign import Campaign, Entrant, num_echoes, rotated
from benchmarks.peers.figures import Figures, num_equal, verdicts
from benchmarks.peers.peer_process import PeerError, PeerProcess
from benchmarks.peers.rendering import Outcome
from benchmarks.peers.runners.harness import Setup
from benchmarks.peers.runs_file import Run, RunsFile
from benchmarks.peers.workload import Load, Sent
from benchmarks.report import RESULTS
from tests.benchmarks.peer_runs import figures, run

TINY = Load(dataset="alpaca", seed=0, tokens_seed=0, scale=0.1, num_requests=3)
LIMIT_S = 60.0


def setup(options: Mapping[str, Any]) -> Setup:
    limits: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "pool_tokens": 64, "step_tokens": 64, "max_len": 64}
    return Setup(model="", cache="", dtype="float32", options=dict(options), **limits)


def scripted() -> PeerProcess:
    return PeerProcess([sys.executable, "-m", "tests.benchmarks.scripted_peer"], {})


class FakePeer:
    """Peer that answers at once; the log holds its messages."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        if message["op"] == "load":
            self._log.append(f"{self._name} loads")
            return {"seconds": 0.0, "computes_in": "float32", "versions": {}}
        self._log.append(f"{self._name} runs {len(message['requests'])}")
        return {"answers": [answer(each["num_output"], each["follows"]) for each in message["requests"]]}

    def peak_memory_bytes(self) -> int:
        return 2**20

    def close(self) -> None:
        self._log.append(f"{self._name} ends")


def answer(num_output: int, follows: int | None) -> dict[str, Any]:
    sent_s = 0.0 if follows is None else 0.75
    return {"sent_s": sent_s, "token_s": [1.0 + n for n in range(num_output)], "token_ids": [7] * num_output}


def campaign_of(entrants: Sequence[Entrant], folder: Path, rounds: int = 2, *, resume: bool = False) -> Campaign:
    runs = RunsFile(folder / "runs.jsonl", {"plan": 1}, resume=resume)
    return Campaign(
        entrants=entrants,
        loads={"sharegpt": TINY},
        rounds={"sharegpt": rounds},
        vocab_size=100,
        runs=runs,
        tell=lambda line: None,
    )


def fakes(names: str, log: list[str]) -> list[Entrant]:
    def entrant(name: str) -> Entrant:
        return Entrant(name=name, start=lambda: FakePeer(name, log), setup=setup({}), loads=["sharegpt"])

    return [entrant(name) for name in names]


def test_a_runner_answers_over_the_protocol_whatever_its_peer_prints() -> None:
    with scripted() as peer:
        loaded = peer.ask({"op": "load", "setup": vars_of(setup({}))}, LIMIT_S)
        assert loaded["computes_in"] == "float32"
        assert loaded["versions"]["pip"][0].isdigit() and loaded["versions"]["no-such-package"] == "not installed"
        requests = [{"prompt": [5, 6], "num_output": 3, "arrival_s": 0.0} for _ in range(2)]
        answers = peer.ask({"op": "run", "requests": requests}, LIMIT_S)["answers"]
        assert [each["token_ids"] for each in answers] == [[0, 1, 2], [1, 2, 3]]
        assert all(len(each["token_s"]) == 3 and each["token_s"][0] >= each["sent_s"] for each in answers)
        assert peer.peak_memory_bytes() > 1 << 20


@pytest.mark.parametrize(("what", "reason"), [("raise", "ValueError: as scripted"), ("exit", "it ended with 3")])
def test_what_goes_wrong_in_a_runner_is_said_with_what_it_printed(what: str, reason: str) -> None:
    with scripted() as peer, pytest.raises(PeerError, match=f"(?s){reason}.*this is no answer"):
        peer.ask({"op": "load", "setup": vars_of(setup({"at_load": what}))}, LIMIT_S)


def test_a_runner_that_hangs_is_given_up() -> None:
    with scripted() as peer:
        peer.ask({"op": "load", "setup": vars_of(setup({"at_run": "hang"}))}, LIMIT_S)
        with pytest.raises(PeerError, match="no answer within"):
            peer.ask({"op": "run", "requests": []}, 0.2)


def test_a_campaign_notes_a_system_that_comes_short_and_goes_on_with_the_others(tmp_path: Path) -> None:
    log: list[str] = []
    short = Entrant(name="short", start=scripted, setup=setup({"at_run": "short"}), loads=["sharegpt"])
    campaign = campaign_of([short, *fakes("b", log)], tmp_path, rounds=1)
    campaign.run()
    failed = campaign.runs.runs[0, "short", "sharegpt"]
    assert failed.figures is None and "requested 2" in str(failed.error)
    measured = campaign.runs.runs[0, "b", "sharegpt"]
    assert measured.figures is not None and measured.about is not None and measured.about["computes_in"] == "float32"


def test_every_system_runs_once_a_round_and_another_one_is_first_each_time(tmp_path: Path) -> None:
    log: list[str] = []
    campaign_of(fakes("abc", log), tmp_path, rounds=4).run()
    assert [line[0] for line in log if line.endswith("loads")] == [*"abc", *"bca", *"cab", *"abc"]
    assert log[:4] == ["a loads", "a runs 3", "a runs 3", "a ends"], "a warm-up, the load, and the end before the next"
    assert rotated([], 3) == []


def test_a_turn_of_a_conversation_is_due_when_it_is_sent(tmp_path: Path) -> None:
    campaign = campaign_of(fakes("a", []), tmp_path, rounds=1)
    campaign.loads = {"sharegpt": replace(TINY, num_requests=6, num_turns=3)}
    campaign.run()
    measured = campaign.runs.runs[0, "a", "sharegpt"].figures
    assert measured is not None
    assert (measured.first_token_p50_s, measured.first_token_p99_s) == (0.25, 1.0)


def test_an_interrupted_campaign_goes_on_where_it_was(tmp_path: Path) -> None:
    log: list[str] = []
    campaign_of(fakes("ab", log), tmp_path, rounds=1).run()
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"round": 1, "sys')  # it was interrupted while it wrote
    log.clear()
    campaign = campaign_of(fakes("ab", log), tmp_path, rounds=2, resume=True)
    campaign.run()
    assert [line for line in log if line.endswith("loads")] == ["b loads", "a loads"]
    assert len(campaign.runs.runs) == 4
    again = RunsFile(tmp_path / "runs.jsonl", {"plan": 1}, resume=True)
    assert again.runs == campaign.runs.runs


def test_runs_of_another_plan_and_failed_runs_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    file = RunsFile(path, {"plan": 1}, resume=False)
    file.add(Run(round=0, system="a", load="sharegpt", figures=None, error="no memory"))
    file.add(run("b"))
    assert set(RunsFile(path, {"plan": 1}, resume=True).runs) == {(0, "b", "sharegpt")}
    assert RunsFile(path, {"plan": 2}, resume=True).runs == {}


@pytest.mark.parametrize("changed", [{"commit": "b"}, {"commit": "a-dirty"}, {"machine": {"cpus": 4}}])
def test_runs_of_another_commit_or_machine_are_made_again(tmp_path: Path, changed: dict[str, Any]) -> None:
    path, here = tmp_path / "runs.jsonl", {"commit": "a", "machine": {"cpus": 2}}
    RunsFile(path, {"plan": 1}, resume=False, origin=lambda: here).add(run("b"))
    again = RunsFile(path, {"plan": 1}, resume=True, origin=lambda: here)
    assert [each.origin for each in again.runs.values()] == [here]
    assert RunsFile(path, {"plan": 1}, resume=True, origin=lambda: {**here, **changed}).runs == {}


def test_runs_are_recorded_with_the_commit_that_they_are_of(tmp_path: Path) -> None:
    commits = iter(["a", "b"])
    file = RunsFile(tmp_path / "runs.jsonl", {}, resume=False, origin=lambda: {"commit": next(commits)})
    for number in range(2):
        file.add(run("quire", number=number))
    recorded = Outcome(list(file.runs.values()), {}).as_json(["sharegpt"])["runs"]
    assert [each["commit"] for each in recorded] == ["a", "b"]


def test_figures_are_made_of_moments() -> None:
    made = Figures.of([0.0, 1.0], [[1.0, 2.0, 4.0], [2.0, 5.0]], 3 << 20)
    assert made.tokens_per_s == 1.0  # 5 tokens in 5 s
    assert made.normalised_latency_s == pytest.approx((4 / 3 + 4 / 2) / 2, abs=1e-4)
    assert (made.first_token_p50_s, made.first_token_p99_s) == (1.0, 1.0)
    assert (made.per_token_p50_s, made.per_token_p99_s) == (2.0, 3.0)  # gaps 1, 2, 3
    assert made.peak_memory_mib == 3.0


def test_a_median_is_taken_figure_by_figure() -> None:
    assert Figures.median_of([figures(1.0), figures(9.0), figures(3.0)]) == figures(3.0)
    with pytest.raises(ValueError, match="at least one round"):
        Figures.median_of([])


def rounds_of(system: str, *rates: float) -> list[Run]:
    return [run(system, rate=rate, number=number) for number, rate in enumerate(rates)]


def test_a_target_is_met_where_every_round_says_so() -> None:
    theirs = [*rounds_of("openvino", 100.0, 100.0, 100.0), *rounds_of("vllm", 90.0, 90.0, 90.0)]
    wanted = {"tokens_per_s": 1.05}
    outcomes = {
        (110.0, 105.0, 120.0): True,
        (104.0, 100.0, 101.0): False,
        (104.0, 120.0, 130.0): None,
        (110.0, 120.0): None,  # too few
    }
    for rates, met in outcomes.items():
        (made,) = verdicts([*rounds_of("quire", *rates), *theirs], "sharegpt", "quire", wanted)
        assert (made.rivals, made.met) == (("openvino",), met)
    (made,) = verdicts([*rounds_of("quire", 104.0, 120.0, 130.0), *theirs], "sharegpt", "quire", wanted)
    assert made.sentence == ("tokens/s: 1.20 x openvino (1.04 to 1.30 in 3 rounds); target 1.05 x: within the noise")


def test_a_target_is_missed_by_the_round_in_which_any_peer_was_too_near() -> None:
    ours, openvino = rounds_of("quire", 110.0, 110.0, 110.0), rounds_of("openvino", 90.0, 108.0, 90.0)
    runs = [*ours, *openvino, *rounds_of("vllm", 100.0, 100.0, 100.0)]
    (made,) = verdicts(runs, "sharegpt", "quire", {"tokens_per_s": 1.05})
    assert (made.rivals, made.met, round(made.ratio, 2)) == (("vllm", "openvino"), None, 1.1)
    assert "x vllm or openvino (1.02 to 1.10 in 3 rounds)" in made.sentence
    (made,) = verdicts(runs[:-1], "sharegpt", "quire", {"tokens_per_s": 1.05})  # vllm failed in the last round
    assert made.rivals == ("vllm", "openvino") and round(max(made.ratios), 2) == 1.22


def test_the_best_peer_is_found_figure_by_figure_and_less_time_is_better() -> None:
    runs = [run(name, "rate-2", number=number) for name in ("quire", "openvino", "vllm") for number in range(3)]
    swift = [replace(each.figures or figures(1.0), first_token_p50_s=0.05) for each in runs[6:]]
    runs[6:] = [replace(each, figures=made) for each, made in zip(runs[6:], swift, strict=True)]
    made = verdicts(runs, "rate-2", "quire", {"first_token_p50_s": 1.0, "first_token_p99_s": 1.0})
    assert [(each.figure, each.rivals, each.ratio, each.met) for each in made] == [
        ("first_token_p50_s", ("vllm",), 0.5, False),
        ("first_token_p99_s", ("openvino",), 1.0, True),
    ]


def test_nothing_is_said_without_ours_or_without_a_peer() -> None:
    assert verdicts(rounds_of("openvino", 1.0, 1.0, 1.0), "sharegpt", "quire", {"tokens_per_s": 1.05}) == []
    assert verdicts(rounds_of("quire", 1.0, 1.0, 1.0), "sharegpt", "quire", {"tokens_per_s": 1.05}) == []


def test_outputs_that_begin_with_their_prompts_are_found() -> None:
    requests = [Sent([5, 6, 7, 8, 9], 4, 0.0), Sent([1], 4, 0.0), Sent([4, 3, 2, 1], 4, 0.0)]
    assert num_echoes(requests, [[6, 7, 8, 1], [1, 1, 1, 1], [9, 9, 9, 9]]) == 1
    assert num_echoes(requests, [[7, 8, 9, 1], [5, 5, 5, 5], [3, 2, 1, 9]]) == 2


def test_outputs_are_compared_to_their_first_difference() -> None:
    equal = num_equal([[1, 2, 3], [4, 9, 6]], [[1, 2, 3], [4, 5, 6]])
    assert equal == {"requests": 2, "equal": 1, "tokens_before_a_difference": 4, "tokens": 6}


def test_what_is_shown_has_medians_targets_equal_outputs_and_every_failure() -> None:
    runs = [run("quire", rate=rate, number=number) for number, rate in enumerate([200.0, 220.0, 210.0])]
    runs += [*rounds_of("openvino", 150.0, 150.0, 150.0), run("transformers", rate=100.0), run("quire", "rate-2")]
    runs += [run("reference", "parity", token_ids=[[1, 2]]), run("quire", "parity", token_ids=[[1, 3]])]
    runs += [Run(round=0, system="llamacpp", load="sharegpt", figures=None, error="it ended with 1")]
    outcome, loads = Outcome(runs, {"vllm": "no such wheel"}), ["sharegpt", "rate-2", "parity"]
    text = outcome.as_text(loads)
    assert "tokens/s: 1.40 x openvino (1.33 to 1.47 in 3 rounds); target 1.05 x: met" in text
    assert "vLLM, all cores: not set up: no such wheel" in text
    assert "llama.cpp, batched: round 1, sharegpt: it ended with 1" in text
    assert "0 of 1 requests" in text and "1 of 2" in text
    shown = json.loads(json.dumps(outcome.as_json(loads)))
    assert shown["key_figures"]["sharegpt_quire_tokens_per_s"] == 210.0
    assert set(shown["failures"]) == {"vllm", "llamacpp"}
    assert not {"targets", "defaults"} & set(shown), "a verdict would stay that of the rule of its day"
    charts = outcome.charts("tiny", loads)
    assert set(charts) == {"sharegpt", "latency"} and all(each.startswith("<svg") for each in charts.values())


def vars_of(made: Setup) -> dict[str, Any]:
    return {name: getattr(made, name) for name in Setup.__dataclass_fields__}


def test_ourselves_with_flags_are_no_peer_and_have_a_target_of_their_own() -> None:
    runs = [*rounds_of("quire", 98.0, 98.0, 98.0), *rounds_of("quire-flags", 100.0, 100.0, 100.0)]
    runs += rounds_of("openvino", 80.0, 80.0, 80.0)
    outcome = Outcome(runs, {})
    found = [*outcome.verdicts("sharegpt"), *outcome.defaults("sharegpt")]
    against = {each.rivals: (round(each.ratio, 3), each.met) for each in found}
    assert against == {("openvino",): (1.225, True), ("quire-flags",): (0.98, True)}


def test_tokens_that_are_drawn_have_targets_of_their_own() -> None:
    runs = [*rounds_of("quire", 160.0, 160.0, 160.0), *rounds_of("openvino", 100.0, 100.0, 100.0)]
    (greedy,), (drawn,) = (Outcome(runs, {}, top_p).verdicts("sharegpt") for top_p in (None, 0.95))
    assert (greedy.target, greedy.met) == (1.05, True)
    assert (drawn.target, drawn.met) == (1.7, False)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("peers_*.json")), ids=lambda path: path.stem)
def test_a_result_file_says_of_its_runs_what_is_made_of_them_now(path: Path) -> None:
    document = json.loads(path.read_text())
    keys = ("round", "system", "load")
    runs = [Run(**{key: each[key] for key in keys}, figures=Figures(**each["figures"])) for each in document["runs"]]
    made = json.loads(json.dumps(Outcome(runs, {}, document.get("top_p")).as_json(list(document["medians"]))))
    assert not {"targets", "defaults"} & set(document)
    assert {key: document[key] for key in ("key_figures", "medians")} == {
        key: made[key] for key in ("key_figures", "medians")
    }
