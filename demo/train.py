"""Train the demo model from nothing but the demo grammar: `python -m demo.train --out demo/model`.

Writes a Hugging Face folder (LLaMA architecture, bfloat16 safetensors) and `training.json`, which has
the settings and the loss on documents of another seed. Knows nothing of serving.
"""

import argparse
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from demo.chats import BOS, EOS, PAD
from demo.stories import documents
from demo.tokenizer import save_tokenizer, train_tokenizer, write_json

MAX_LENGTH = 2048
# Most steps see short windows, some see long ones, so that every position up to 1,024 is trained.
WINDOWS = (256, 512, 256, 1024)
HELD_OUT_SEED_OFFSET = 1_000_003
NUM_HELD_OUT_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that decide the weights, apart from the machine's rounding."""

    seed: int = 7
    steps: int = 2_600
    tokens_per_step: int = 1_024
    peak_learning_rate: float = 2.5e-3
    warmup_steps: int = 80
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A decoder of about 3.8 million parameters with grouped-query attention and tied embeddings."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    return LlamaForCausalLM(config)


def windows(tokenizer: Tokenizer, seed: int, tokens_per_step: int) -> Iterator[Tensor]:
    """Packed documents as int64 batches [tokens_per_step / window, window], the window by turns."""
    texts = documents(seed)
    buffer: list[int] = []
    for index in count():
        window = WINDOWS[index % len(WINDOWS)]
        while len(buffer) < tokens_per_step:
            buffer += tokenizer.encode(next(texts), add_special_tokens=False).ids
        yield torch.tensor(buffer[:tokens_per_step]).view(-1, window)
        del buffer[:tokens_per_step]


def loss_of(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats, computed under bfloat16 autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < settings.warmup_steps:
        return settings.peak_learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.peak_learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: LlamaForCausalLM, settings: Settings) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.peak_learning_rate, betas=(0.9, 0.95))


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, settings: Settings) -> None:
    """Train for all steps, with a line of progress every fifty."""
    optimizer = make_optimizer(model, settings)
    batches = windows(tokenizer, settings.seed, settings.tokens_per_step)
    start = time.monotonic()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        loss = loss_of(model, next(batches))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        if step % 50 == 0 or step == settings.steps - 1:
            tokens_per_s = (step + 1) * settings.tokens_per_step / (time.monotonic() - start)
            print(f"step {step} loss {loss.item():.3f} {tokens_per_s:.0f} tokens/s", flush=True)


@torch.inference_mode()
def held_out_loss(
    model: LlamaForCausalLM, tokenizer: Tokenizer, settings: Settings, num_tokens: int = NUM_HELD_OUT_TOKENS
) -> float:
    """Mean loss on documents of a seed that training never uses."""
    batches = windows(tokenizer, settings.seed + HELD_OUT_SEED_OFFSET, settings.tokens_per_step)
    num_batches = num_tokens // settings.tokens_per_step
    return sum(loss_of(model, next(batches)).item() for _ in range(num_batches)) / num_batches


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """The complete Hugging Face folder, with weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.bfloat16()
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # a checkout on another machine reads it as any user
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(model.config, name) for name in names}
    write_json(folder / "generation_config.json", {**ids, "transformers_version": transformers.__version__})
    save_tokenizer(tokenizer, folder, MAX_LENGTH)


def report(settings: Settings, num_parameters: int, loss: float, wall_s: float) -> dict[str, object]:
    """Content of `training.json`."""
    return {
        **asdict(settings),
        "windows": WINDOWS,
        "tokens": settings.steps * settings.tokens_per_step,
        "num_parameters": num_parameters,
        "held_out_seed": settings.seed + HELD_OUT_SEED_OFFSET,
        "held_out_tokens": NUM_HELD_OUT_TOKENS,
        "held_out_loss": round(loss, 4),
        "wall_s": round(wall_s),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def main() -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--threads", type=int, default=1, help="more are slower where cores are shared")
    arguments = parser.parse_args()
    settings = Settings(seed=arguments.seed, steps=arguments.steps)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(settings.seed)
    start = time.monotonic()
    tokenizer = train_tokenizer(settings.seed)
    model = build_model(tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters} parameters, {tokenizer.get_vocab_size()} entries in the vocabulary", flush=True)
    train(model, tokenizer, settings)
    save(model, tokenizer, arguments.out)
    loss = held_out_loss(model, tokenizer, settings)
    result = report(settings, num_parameters, loss, time.monotonic() - start)
    write_json(arguments.out / "training.json", result)
    print(f"held-out loss {loss:.4f}")


if __name__ == "__main__":
    main()
