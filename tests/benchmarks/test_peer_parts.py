"""Parts of the comparison with peers: how runners drive engines, loads and models, environments, systems."""

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.peers.environments import Recipe, SetUpError, python_of, variables_in
from benchmarks.peers.runners.harness import Recorder, Request, drive_batches, drive_steps
from benchmarks.peers.systems import ENVIRONMENT, RECIPES, SYSTEMS
from benchmarks.peers.workload import CHATS, LOADS, MODELS, longest_sequence, warm_up


class Stepper:
    """Engine that gives every request one token a step: the request's index."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.most = 0
        self.prompts: dict[int, list[int]] = {}

    def add(self, request: Request) -> None:
        self.prompts[request.index] = request.prompt
        self.live[request.index] = request.num_output

    def step(self) -> list[tuple[int, list[int]]]:
        made = [(index, [index, index]) for index in self.live]  # one more than is counted at the end
        self.most = max(self.most, len(made))
        self.live = {index: left - 2 for index, left in self.live.items() if left > 2}
        return made


def test_a_driven_engine_gets_requests_when_they_come_and_no_token_too_many_counts() -> None:
    recorder = Recorder([Request(0, [5], 3, 0.0), Request(1, [5], 4, 0.02)])
    engine = Stepper()
    drive_steps(engine, recorder)
    assert [each["token_ids"] for each in recorder.answers()] == [[0, 0, 0], [1, 1, 1, 1]]
    assert recorder.sent_s[1] >= 0.02 and engine.live == {}


def test_turns_of_a_conversation_come_one_behind_the_other_with_all_that_came_before() -> None:
    requests = [
        Request(0, [5], 2, 0.0),
        Request(1, [6], 1, 0.0),
        Request(2, [7, 8], 3, 0.0, 0),
        Request(3, [9], 1, 0.0, 2),
    ]
    recorder = Recorder(requests)
    engine = Stepper()
    drive_steps(engine, recorder)
    assert [each["token_ids"] for each in recorder.answers()] == [[0, 0], [1], [2, 2, 2], [3]]
    assert engine.prompts == {0: [5], 1: [6], 2: [5, 0, 0, 7, 8], 3: [5, 0, 0, 7, 8, 2, 2, 2, 9]}
    assert recorder.sent_s[3] >= recorder.token_s[2][-1] and recorder.sent_s[2] >= recorder.token_s[0][-1]
    assert engine.most == 2 and recorder.next_turn(1) is None


def test_batches_are_of_those_that_wait() -> None:
    sizes = []

    def run_batch(batch: Sequence[Request], recorder: Recorder) -> None:
        sizes.append(len(batch))
        for request in batch:
            recorder.record_tokens(request.index, [1] * request.num_output)

    recorder = Recorder([Request(index, [5], 2, 0.0) for index in range(5)])
    drive_batches(run_batch, 2, recorder)
    assert sizes == [2, 2, 1] and all(recorder.is_complete(index) for index in range(5))


def test_loads_have_the_totals_that_targets_were_set_on() -> None:
    totals = {}
    for name in ("sharegpt", "alpaca"):
        requests = LOADS[name].requests(MODELS["125m"].vocab_size)
        assert requests == LOADS[name].requests(MODELS["125m"].vocab_size)
        assert all(each.arrival_s == 0.0 for each in requests)
        totals[name] = (sum(len(each.prompt) for each in requests), sum(each.num_output for each in requests))
    assert totals == {"sharegpt": (2910, 5335), "alpaca": (1229, 3120)}  # wanted: 2,912 / 5,337 and 1,227 / 3,121


def test_open_loads_come_at_their_rate_with_the_requests_of_the_closed_one() -> None:
    closed, opened = LOADS["sharegpt"].requests(100), LOADS["rate-4"].requests(100)
    assert [each.num_output for each in closed] == [each.num_output for each in opened]
    arrivals_s = [each.arrival_s for each in opened]
    assert arrivals_s == sorted(arrivals_s) and arrivals_s[-1] == pytest.approx(64 / 4, rel=0.25)


def test_conversations_share_their_beginning_and_go_on_turn_by_turn() -> None:
    load = LOADS[CHATS]
    requests = load.requests(MODELS["125m"].vocab_size)
    num_chats = load.num_requests // load.num_turns
    first, later = requests[:num_chats], requests[num_chats:]
    assert len({tuple(each.prompt[: load.shared_tokens]) for each in first}) == 1
    assert len({tuple(each.prompt[: load.shared_tokens + 8]) for each in first}) > 1
    assert [each.follows for each in first] == [None] * num_chats
    assert [each.follows for each in later] == list(range(len(later)))
    assert max(len(each.prompt) + each.num_output for each in requests) < longest_sequence(requests) < 2048


def test_no_load_meets_prompts_that_another_or_the_warm_up_has_left_in_a_cache() -> None:
    vocab_size = MODELS["125m"].vocab_size
    seen: set[tuple[int, ...]] = set()
    for name, load in LOADS.items():
        prompts = [each.prompt for each in [*warm_up(load, vocab_size), *load.requests(vocab_size)]]
        begins = {tuple(prompt[:8]) for prompt in prompts if len(prompt) >= 8}
        assert begins and not begins & seen, f"{name} begins like another load"
        seen |= begins
    first = LOADS["long"].requests(vocab_size)
    assert [(len(each.prompt), each.num_output) for each in first] == [(1500, 48)] * 12


def test_models_have_the_sizes_of_their_names() -> None:
    shape = MODELS["125m"]
    assert (shape.head_dim, shape.num_heads, shape.num_kv_heads, shape.tied) == (64, 12, 4, False)
    millions = {
        name: (shape.num_step_weights + (0 if shape.tied else shape.vocab_size * shape.hidden_size)) / 1e6
        for name, shape in MODELS.items()
    }
    assert millions == {name: pytest.approx(int(name[:-1]), rel=0.12) for name in MODELS}


def test_an_environment_is_made_once_and_anew_for_another_recipe(tmp_path: Path) -> None:
    made: list[Recipe] = []

    def install(place: Path, recipe: Recipe) -> None:
        place.mkdir()
        made.append(recipe)

    first, second = Recipe(requirements=("peer==1",)), Recipe(requirements=("peer==2",))
    for recipe in (first, first, second):
        assert python_of("peer", recipe, tmp_path, install) == tmp_path / "peer" / "bin" / "python"
    assert made == [first, second]


def test_an_environment_that_cannot_be_made_gives_its_reason_and_is_tried_again(tmp_path: Path) -> None:
    tries = 0

    def install(place: Path, recipe: Recipe) -> None:
        nonlocal tries
        tries += 1
        place.mkdir()
        raise subprocess.CalledProcessError(1, ["pip", "install", "peer==1"], stderr="no matching distribution")

    for _ in range(2):
        with pytest.raises(SetUpError, match="peer==1: no matching distribution"):
            python_of("peer", Recipe(requirements=("peer==1",)), tmp_path, install)
    assert tries == 2


def test_every_system_has_a_recipe_a_runner_and_loads() -> None:
    runners = Path("benchmarks/peers/runners")
    for system in SYSTEMS.values():
        assert system.recipe is None or system.recipe in RECIPES
        assert (runners / f"{system.runner}.py").is_file()
        assert set(system.loads) <= set(LOADS)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Intel's OpenMP is for x86")
def test_vllm_runs_as_its_page_for_cpus_asks_for() -> None:
    theirs = [system for system in SYSTEMS.values() if system.recipe == "vllm"]
    assert len(theirs) > 3
    assert all(system.variables.get("LD_PRELOAD") == f"{ENVIRONMENT}/lib/libiomp5.so" for system in theirs)
    assert any(each.startswith("intel-openmp==") for each in RECIPES["vllm"].requirements)


def test_a_library_is_preloaded_from_the_environment_and_must_be_there(tmp_path: Path) -> None:
    python, variables = tmp_path / "bin" / "python", {"LD_PRELOAD": f"{ENVIRONMENT}/lib/a.so", "THREADS": "0-1"}
    with pytest.raises(SetUpError, match=r"there is no .*/lib/a\.so to preload"):
        variables_in(variables, python, ENVIRONMENT)
    library = tmp_path / "lib" / "a.so"
    library.parent.mkdir()
    library.touch()
    assert variables_in(variables, python, ENVIRONMENT) == {"LD_PRELOAD": str(library), "THREADS": "0-1"}
