"""The part of the demonstration with several outputs of one prompt: drawn ones, then the likeliest of a beam search.

Shows the saving of the paper's block sharing: the prompt is computed and kept once for all outputs.
"""

from rich.console import Console
from rich.markup import escape

import quire

NUM_SAMPLES = 4
BEAM_WIDTH = 4
NUM_BEST = 2
MAX_TOKENS = 40
SEED = 7


async def branch(client: quire.AsyncClient, prompt: str, console: Console) -> list[str]:
    """Continue a prompt in several ways and print them. Returns descriptions of the parts that failed."""
    drawn = await client.generate(prompt, n=NUM_SAMPLES, max_tokens=MAX_TOKENS, temperature=0.9, seed=SEED)
    _show(f"{NUM_SAMPLES} samples of one prompt", drawn, console)
    best = await client.generate(prompt, beam_width=BEAM_WIDTH, n=NUM_BEST, max_tokens=MAX_TOKENS)
    console.print()
    _show(f"the {NUM_BEST} best of {BEAM_WIDTH} beams", best, console)
    return [*_problems("samples", drawn, NUM_SAMPLES), *_problems("beams", best, NUM_BEST)]


def _show(title: str, completion: quire.Completion, console: Console) -> None:
    memory = completion.memory
    console.print(
        f"[bold]{title}[/bold]: {memory.blocks} KV blocks, not {memory.blocks + memory.saved_blocks}, by sharing "
        f"({memory.saving or 0.0:.0%} saved); {memory.copied_blocks} copied"
    )
    for sample in completion.samples:
        score = "" if sample.score is None else f" [dim]{sample.score:.3f}[/dim]"
        console.print(f"  [bold cyan]{sample.index + 1}[/bold cyan]{score} {escape(' '.join(sample.text.split()))}")


def _problems(what: str, completion: quire.Completion, num_wanted: int) -> list[str]:
    found = []
    if len(completion.samples) != num_wanted:
        found.append(f"{len(completion.samples)} {what} came, not {num_wanted}")
    if not completion.memory.saved_blocks:
        found.append(f"the {what} of one prompt shared no block")
    return found
