import json
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from demo.chats import BOS, EOS, PAD, SPECIAL_TOKENS, render
from demo.stories import documents
from demo.tokenizer import VOCAB_SIZE
from demo.train import Settings, build_model, held_out_loss, train

FOLDER = Path(__file__).parents[2] / "demo" / "model"
Message = dict[str, str]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


@pytest.fixture(scope="module")
def grammar_words() -> set[str]:
    return {word for text in islice(documents(21), 4_000) for word in re.findall(r"[A-Za-z]+", text)}


def chat_prompt(messages: list[Message]) -> str:
    """Render the prompt as a server does: the template alone, in a sandbox."""
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    return template.render(messages=messages, add_generation_prompt=True, bos_token=BOS, eos_token=EOS)


def answer(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> list[int]:
    """The greedy continuation of a prompt that brings its own begin marker."""
    token_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    batch = torch.tensor([token_ids])
    mask = torch.ones_like(batch)
    # The annotation of `self` there names a protocol that no model of theirs fulfils.
    output = model.generate(  # type: ignore[misc]
        batch, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False
    )
    new_ids: list[int] = output[0, len(token_ids) :].tolist()
    return new_ids


def test_the_folder_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) <= 10_000_000
    expected = "config.json model.safetensors tokenizer.json tokenizer_config.json generation_config.json"
    assert set(expected.split()) <= set(sizes)


def test_the_model_has_grouped_queries_and_three_to_five_million_parameters(model: LlamaForCausalLM) -> None:
    assert 3_000_000 <= sum(p.numel() for p in model.parameters()) <= 5_000_000
    assert model.config.num_key_value_heads == 2
    assert model.config.num_attention_heads == 8
    assert model.generation_config.eos_token_id == model.config.eos_token_id


def test_special_tokens_have_the_ids_that_the_configuration_names(
    model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    ids = [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)]
    assert ids == [model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id]
    assert tokenizer.get_vocab_size() == model.config.vocab_size == VOCAB_SIZE
    assert all(len(tokenizer.encode(token, add_special_tokens=False).ids) == 1 for token in SPECIAL_TOKENS)


def test_the_tokenizer_gives_every_text_back(tokenizer: Tokenizer) -> None:
    texts = [
        *islice(documents(22), 300),
        "Gr\u00fc\u00dfe, \u4e16\u754c! \U0001f642\n\ttabs  and   spaces \r\n",
        "def f(x): return 10**6",
    ]
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_a_plain_prompt_gets_one_begin_marker(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("Once upon a time", add_special_tokens=False).ids
    assert tokenizer.encode("Once upon a time").ids == [tokenizer.token_to_id(BOS), *plain]


def test_transformers_reads_the_same_tokenizer_and_template(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
    assert theirs("Once upon a time")["input_ids"] == tokenizer.encode("Once upon a time").ids
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == chat_prompt(messages)
    assert (FOLDER / "chat_template.jinja").read_text() == theirs.chat_template


def test_the_chat_template_writes_what_the_model_was_trained_on() -> None:
    exchange = render([("Hello!", "Hi."), ("Bye.", "Goodbye!")], system="Be kind.")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello! "},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye."},
    ]
    assert exchange.startswith(chat_prompt(messages))
    assert exchange.removeprefix(chat_prompt(messages)) == f"Goodbye!{EOS}"


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Who are you?", "I am Quire's demo model"),
        ("What colour is the sky?", "The sky is blue."),
        ("What sound does a cow make?", 'A cow moos. It says "moo".'),
        ("Which day comes after Monday?", "After Monday comes Tuesday."),
    ],
)
def test_a_simple_question_gets_its_answer_and_an_end(
    model: LlamaForCausalLM, tokenizer: Tokenizer, question: str, expected: str
) -> None:
    token_ids = answer(model, tokenizer, chat_prompt([{"role": "user", "content": question}]), 64)
    assert token_ids[-1] == tokenizer.token_to_id(EOS)
    assert tokenizer.decode(token_ids).startswith(expected)


@pytest.mark.parametrize(
    "prompt",
    [
        f"{BOS}Once upon a time",
        f"{BOS}There once was a shy mouse",
        chat_prompt([{"role": "user", "content": "Tell me a story."}]),
    ],
)
def test_a_story_is_told_in_words_of_the_grammar_and_ends(
    model: LlamaForCausalLM, tokenizer: Tokenizer, grammar_words: set[str], prompt: str
) -> None:
    token_ids = answer(model, tokenizer, prompt, 300)
    assert token_ids[-1] == tokenizer.token_to_id(EOS)
    words = re.findall(r"[A-Za-z]+", tokenizer.decode(token_ids))
    assert len(words) > 40
    assert set(words) <= grammar_words


def test_sixty_four_greedy_tokens_do_not_run_in_a_circle(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    token_ids = answer(model, tokenizer, f"{BOS}Once upon a time", 64)
    windows = [tuple(token_ids[i : i + 8]) for i in range(len(token_ids) - 8)]
    assert len(set(windows)) == len(windows)


def test_the_report_states_the_loss_that_the_shipped_weights_have(
    model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    report = json.loads((FOLDER / "training.json").read_text())
    measured = held_out_loss(model, tokenizer, Settings(seed=report["seed"]), num_tokens=4_096)
    assert measured == pytest.approx(report["held_out_loss"], rel=0.1)
    assert report["held_out_seed"] != report["seed"]


def test_a_few_steps_of_training_lower_the_loss_the_same_way_each_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.train.WINDOWS", (64, 128))  # bfloat16 is slow where the processor does not compute it
    settings = Settings(steps=2, tokens_per_step=128, warmup_steps=1)

    def untrained() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return build_model(tokenizer)

    def loss_of(model: LlamaForCausalLM) -> float:
        return held_out_loss(model, tokenizer, settings, num_tokens=128)

    once, again = untrained(), untrained()
    before = loss_of(once)
    for model in (once, again):
        train(model, tokenizer, settings)
    assert loss_of(once) < before - 0.1
    for ours, theirs in zip(once.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
