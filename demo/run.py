"""The demonstration of `make demo`: real services, several stories at once, one chat, several outputs of one prompt,
and statistics.

Starts `quire serve` on a free port as a user would, talks to it only through the SDK, and ends it. Exit code 0
means that every part went well.
"""

import asyncio
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

import quire
from demo.branches import branch
from quire.cli.supervisor.listen_addresses import ListenAddresses
from quire.stats import BlockStats

MODEL = "demo/model"
DATA_DIR = Path(".quire/demo")
NUM_BLOCKS = 256
END_S = 60.0
LOOK_S = 0.02  # between two samples of the KV memory's use
MAX_TOKENS = 160
LINE_CHARACTERS = 50  # of a piece before it is printed as a line
PROMPT_CHARACTERS = 60  # shown of a long prompt
LIVE_CHARACTERS = 140  # of each story while it grows, so that all of them fit a small terminal

# Long enough to fill several blocks of 16 tokens; the last two stories begin with it.
SHARED = (
    "Once upon a time there was a brave girl named Lucy. She lived with her grandmother close to the forest. "
    "Her best friend was a gentle fox named Oscar. They often played by the river together. One windy day "
)
PROMPTS = (
    "Once upon a time there was a funny boy called Jack.",
    "One day a small puppy found an old map.",
    "A kind goose lived near the beach.",
    SHARED + "Lucy found a box.",
    SHARED + "Oscar was afraid.",
)
QUESTION = "Who are you?"
NEXT = ".venv/bin/quire chat"


@dataclass(slots=True)
class Story:
    """One completion as its reader sees it."""

    name: str
    prompt: str
    text: str = ""
    num_tokens: int = 0
    submitted_s: float = 0.0
    started: asyncio.Event = field(default_factory=asyncio.Event)  # set with its first token
    first_s: float | None = None
    last_s: float = 0.0
    usage: quire.Usage = field(default_factory=quire.Usage)
    finish: str = ""

    @property
    def opening(self) -> str:
        """The prompt, or the end of a long one from a whole word on."""
        return _last_words(self.prompt, PROMPT_CHARACTERS)

    @property
    def time_to_first_token_s(self) -> float:
        return (self.first_s or self.last_s) - self.submitted_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / (self.last_s - self.submitted_s)


class Screen:
    """The growing stories: a live table on a terminal, otherwise lines with the story's name."""

    def __init__(self, console: Console, stories: list[Story]) -> None:
        self._console = console
        self._stories = stories
        self._shown: dict[str, int] = {}
        self._live = Live(console=console, refresh_per_second=12) if console.is_terminal else None

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.start()
        else:
            for story in self._stories:
                self._print_line(story, f"> {story.opening}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update("")
            self._live.stop()
            self._console.print(self._table(full=True))

    def update(self, story: Story) -> None:
        """Show new text; without a terminal as lines of whole words, once there are enough or the story has ended."""
        if self._live is not None:
            self._live.update(self._table())
            return
        shown = self._shown.get(story.name, 0)
        end = len(story.text) if story.finish else story.text.rfind(" ")
        piece = " ".join(story.text[shown:end].split())
        if piece and (len(piece) > LINE_CHARACTERS or story.finish):
            self._shown[story.name] = end
            self._print_line(story, piece)

    def _print_line(self, story: Story, line: str) -> None:
        self._console.print(f"[{story.name}] {line}", markup=False, soft_wrap=True)

    def _table(self, *, full: bool = False) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 1))
        for story in self._stories:
            text = story.text if full else _last_words(story.text, LIVE_CHARACTERS)
            told = f"[dim]{escape(story.opening)}[/dim] {escape(text.strip())}"
            table.add_row(f"[bold cyan]{story.name}[/bold cyan]", told)
        return table


def _last_words(text: str, num_characters: int) -> str:
    """The end of a text, from a whole word on."""
    return text if len(text) <= num_characters else "… " + text[-num_characters:].partition(" ")[2]


async def tell(client: quire.AsyncClient, story: Story, screen: Screen) -> None:
    """Streams one story."""
    story.submitted_s = time.monotonic()
    await _read(client.stream(story.prompt, max_tokens=MAX_TOKENS, temperature=0.0), story, screen)


async def chat(client: quire.AsyncClient, story: Story, screen: Screen) -> None:
    """Streams one answer."""
    story.submitted_s = time.monotonic()
    messages = [quire.ChatMessage("user", story.prompt)]
    await _read(client.stream_chat(messages, max_tokens=MAX_TOKENS, temperature=0.0), story, screen)


async def _read(stream: quire.CompletionStream, story: Story, screen: Screen) -> None:
    async with stream:
        async for chunk in stream:
            story.last_s = time.monotonic()
            if chunk.num_tokens and story.first_s is None:
                story.first_s = story.last_s
                story.started.set()
            story.num_tokens += chunk.num_tokens
            story.text += chunk.text
            story.finish = chunk.finish.reason.value if chunk.finish is not None else ""
            screen.update(story)
        story.usage = (await stream.completion()).usage


async def watch_peak(client: quire.AsyncClient, peak: list[BlockStats]) -> None:
    """Keep the snapshot of the KV memory with the most used blocks."""
    while True:
        blocks = (await client.stats()).blocks
        if blocks.used >= peak[0].used:
            peak[0] = blocks
        await asyncio.sleep(LOOK_S)


async def tell_all(client: quire.AsyncClient, stories: list[Story], screen: Screen) -> BlockStats:
    """Tell the stories at once; the last starts after the one with its prefix. Returns the peak of memory use."""
    peak = [BlockStats()]
    watching = asyncio.create_task(watch_peak(client, peak))
    try:
        *early, late = stories
        async with asyncio.TaskGroup() as group:
            for story in early:
                group.create_task(tell(client, story, screen))
            await early[-1].started.wait()
            group.create_task(tell(client, late, screen))
    finally:
        watching.cancel()
    return peak[0]


def report(stories: list[Story], answer: Story, peak: BlockStats, after: BlockStats) -> RenderableType:
    """Statistics of the demonstration."""
    begun_s = min(story.submitted_s for story in stories)
    ended_s = max(story.last_s for story in stories)
    num_tokens = sum(story.num_tokens for story in stories)
    table = Table(title="What it took", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("", "prompt", "from cache", "output", "first token", "tokens/s"):
        table.add_column(name, justify="left" if not name else "right")
    for story in (*stories, answer):
        usage = story.usage
        table.add_row(
            story.name,
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            str(story.num_tokens),
            f"{story.time_to_first_token_s * 1e3:.0f} ms",
            f"{story.tokens_per_s:.0f}",
        )
    totals = Table.grid(padding=(0, 2))
    totals.add_column(style="dim")
    totals.add_row("together", f"{num_tokens / (ended_s - begun_s):.0f} tokens/s")
    totals.add_row("KV blocks", f"{peak.used} used, {peak.cached} cached, {peak.free} free at the peak")
    totals.add_row("waste", f"{peak.waste or 0.0:.1%} of the allocated token slots empty at the peak")
    totals.add_row(
        "prefix cache",
        f"{after.prefix_hit_tokens} of {after.prefix_query_tokens} prompt tokens found "
        f"({after.prefix_hit_rate or 0.0:.0%})",
    )
    return Group(table, "", totals)


def problems(stories: list[Story], answer: Story, peak: BlockStats, after: BlockStats) -> list[str]:
    """Descriptions of the parts that failed."""
    found = [f"{story.name} has no text" for story in (*stories, answer) if not re.search(r"\w", story.text)]
    if not peak.used:
        found.append("no KV block was seen in use")
    if not after.prefix_hit_tokens or not stories[-1].usage.cached_tokens:
        found.append("the shared prefix was not found in the cache")
    return found


async def demonstrate(address: str, console: Console) -> list[str]:
    """Talk to the server. Returns descriptions of the parts that failed."""
    stories = [Story(f"story {i}", prompt) for i, prompt in enumerate(PROMPTS, 1)]
    answer = Story("chat", QUESTION)
    async with quire.AsyncClient(address) as client:
        with Screen(console, stories) as screen:
            peak = await tell_all(client, stories, screen)
        console.print()
        with Screen(console, [answer]) as screen:
            await chat(client, answer, screen)
        console.print()
        found = await branch(client, PROMPTS[-2], console)
        after = (await client.stats()).blocks
    console.print()
    console.print(report(stories, answer, peak, after))
    return [*found, *problems(stories, answer, peak, after)]


async def start_server(listen: str) -> asyncio.subprocess.Process:
    """Start `quire serve` as a process, with our standard output and error."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.cli", "serve", MODEL, "--listen", listen),
        *("--http", "127.0.0.1:0", "--data-dir", str(DATA_DIR), "--num-blocks", str(NUM_BLOCKS)),
    )


async def wait_ready(server: asyncio.subprocess.Process, address: str) -> None:
    """Wait until the server can generate, which takes minutes where kernels compile. Raises QuireError if it ends."""
    async with quire.AsyncClient(address) as client:
        ready = asyncio.create_task(client.wait_ready())
        ended = asyncio.create_task(server.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also at Ctrl-C
            ready.cancel()
            ended.cancel()
            await asyncio.wait({ready, ended})
        if not ended.cancelled():
            raise quire.QuireError(f"quire serve ended with exit code {server.returncode}")
        ready.result()


async def main() -> int:
    """Run the demonstration. Returns the exit code."""
    console = Console(highlight=False)
    with ListenAddresses() as chosen:
        address = chosen.choose("127.0.0.1:0")
    begun_s = time.monotonic()
    server = await start_server(address)
    try:
        await wait_ready(server, address)
        ready_s = time.monotonic() - begun_s
        found = await demonstrate(address, console)
    except* quire.QuireError as errors:
        found = [str(error) for error in errors.exceptions]
        ready_s = 0.0
    finally:
        if server.returncode is None:
            server.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            code = await server.wait()
    if code:
        found.append(f"quire serve ended with exit code {code}")
    for problem in found:
        console.print(f"demo: {problem}", markup=False, style="red")
    if not found:
        total_s = time.monotonic() - begun_s
        console.print(f"ready after {ready_s:.1f} s, stopped cleanly, {total_s:.1f} s in all")
        console.print(f"next: [bold]make serve[/bold], and in another terminal [bold]{NEXT}[/bold]")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        raise SystemExit(asyncio.run(main()))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
