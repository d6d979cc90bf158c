"""One frame of `quire top`. A function of two snapshots and the time between them."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from quire.cli.requests_command import age
from quire.request_list import RequestSummary
from quire.stats import BlockStats, LatencyStats, Stats, WorkerStats

BAR_CELLS = 32
MAX_SHOWN = 10  # requests


def view(
    address: str,
    now: Stats,
    before: Stats | None,
    elapsed_s: float,
    requests: Sequence[RequestSummary] = (),
    has_more: bool = False,
) -> RenderableType:
    """The frame. Rates need an earlier snapshot of the same leaders; without one they are averages since the start.

    Args:
        address: of the server.
        now: what it says.
        before: what it said earlier; None: nothing.
        elapsed_s: seconds between the two.
        requests: the oldest requests that have not ended.
        has_more: True if there are more.
    """
    before = None if before is not None and _counts_anew(now, before) else before
    shown = ["", _requests(requests, has_more)] if requests else []
    return Panel(
        Group(_totals(now, before, elapsed_s), _latency(now.latency), "", _workers(now), *shown, "", _journal(now)),
        title=escape(f"quire at {address}") + ("" if before is not None else ", rates since its start"),
        title_align="left",
        padding=(1, 2),
    )


def _counts_anew(now: Stats, before: Stats) -> bool:
    """True if another leader, whose counts begin at 0, has come in between."""
    has_fewer = now.output_tokens < before.output_tokens or now.num_finished < before.num_finished
    return now.epoch != before.epoch or has_fewer


def block_bar(blocks: BlockStats, num_cells: int = BAR_CELLS) -> Text:
    """Used, cached and free blocks as a bar; a kind that exists gets at least one cell."""
    if not blocks.total:
        return Text("no pool", style="dim")
    used = _cells(blocks.used, blocks.total, num_cells)
    cached = min(_cells(blocks.cached, blocks.total, num_cells), num_cells - used)
    if not blocks.free:
        cached = num_cells - used  # the rest after rounding
    return Text.assemble(("█" * used, "green"), ("▓" * cached, "yellow"), ("░" * (num_cells - used - cached), "dim"))


def percent(part: float | None) -> str:
    """A ratio as text; a dash for None."""
    return "–" if part is None else f"{part:.1%}"


def _cells(part: int, total: int, num_cells: int) -> int:
    return max(1, part * num_cells // total) if part else 0


def _totals(now: Stats, before: Stats | None, elapsed_s: float) -> Table:
    since, period_s = (before, elapsed_s) if before is not None else (None, now.uptime_s)
    num_tokens = now.output_tokens - (since.output_tokens if since else 0)
    num_finished = now.num_finished - (since.num_finished if since else 0)
    rate = 1 / period_s if period_s > 0 else 0.0
    table = Table.grid(padding=(0, 3))
    table.add_row(
        f"running [bold]{now.num_running}[/bold]",
        f"waiting [bold]{now.num_waiting}[/bold]" + (f", paused {now.num_paused}" if now.num_paused else ""),
        f"[bold]{num_tokens * rate:.1f}[/bold] tokens/s",
        f"[bold]{num_finished * rate:.2f}[/bold] requests/s",
    )
    table.add_row(
        f"finished {now.num_finished}",
        f"refused {now.num_refused}",
        f"up {now.uptime_s:.0f} s",
        f"epoch {now.epoch}",
    )
    return table


def _latency(latency: LatencyStats) -> Text:
    """Latencies in one line of at most 80 columns."""
    if not latency.num_requests:
        return Text("latency: no request ended within the last minute", style="dim")
    first = f"first token {_ms(latency.first_token_p50_s)}/{_ms(latency.first_token_p99_s)} ms"
    between = f"per token {_ms(latency.token_p50_s)}/{_ms(latency.token_p99_s)} ms"
    return Text(f"last minute, p50/p99: {first}, {between}")


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _requests(requests: Sequence[RequestSummary], has_more: bool) -> RenderableType:
    """The oldest requests, one line each, cut on a narrow terminal."""
    table = Table(
        Column("request", no_wrap=True, max_width=16),
        Column("state", no_wrap=True),
        Column("tokens", no_wrap=True, justify="right"),
        Column("age", no_wrap=True, justify="right"),
        Column("waiting for", no_wrap=True),
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for each in requests:
        tokens = f"{each.prompt_tokens}+{each.output_tokens}"
        table.add_row(Text(each.request_id), each.state.value, tokens, age(each.age_s), Text(each.waiting_for or ""))
    if not has_more:
        return table
    return Group(table, Text("… more: quire requests", style="dim"))


def _workers(now: Stats) -> RenderableType:
    if not now.workers:
        return Text("no worker is connected", style="red")
    return Group(*(_worker(worker) for worker in now.workers))


def _worker(worker: WorkerStats) -> RenderableType:
    """One worker in lines of at most 80 columns."""
    blocks = worker.blocks
    table = Table.grid(padding=(0, 3))
    table.add_row(
        f"[bold]{escape(worker.worker_id)}[/bold]",
        f"running {worker.num_running}",
        f"step {worker.step_s * 1e3:.1f} ms",
        f"overhead {worker.overhead_s * 1e3:.2f} ms",
        f"preempted {worker.num_preemptions}",
    )
    pool = Table.grid(padding=(0, 3))
    pool.add_row(
        block_bar(blocks),
        f"[green]{blocks.used} used[/green]",
        f"[yellow]{blocks.cached} cached[/yellow]",
        f"{blocks.free} free",
    )
    details = Table.grid(padding=(0, 2))
    details.add_row("pool", _pool(blocks), style="dim")
    details.add_row("sharing", _sharing(worker), style="dim")
    details.add_row("swap", _swap(worker), style="dim")
    if worker.fetched_blocks:
        details.add_row("fetched", f"{worker.fetched_blocks} blocks from other workers", style="dim")
    return Group(table, pool, details)


def _pool(blocks: BlockStats) -> str:
    """Waste in the used blocks, then the use of the whole pool."""
    waste = f"waste {percent(blocks.waste)}"
    split = blocks.split
    if split is None:
        return waste
    return (
        f"{waste}; tokens {split.token_states * 100:.1f}, reserved {split.reservation * 100:.1f}, "
        f"fragments {split.internal_fragmentation * 100:.1f}, free {split.free * 100:.1f} %"
    )


def _sharing(worker: WorkerStats) -> str:
    blocks = worker.blocks
    return (
        f"saves {percent(blocks.saving)}; {blocks.shared} shared, {blocks.pinned} pinned, "
        f"{worker.copied_blocks} copied; prefix hits {percent(blocks.prefix_hit_rate)}"
    )


def _swap(worker: WorkerStats) -> str:
    """Swaps and recomputations of preempted requests."""
    return (
        f"{worker.num_swaps} swaps: {worker.swapped_out_blocks} blocks out, {worker.swapped_in_blocks} in, "
        f"host {worker.used_host_blocks}/{worker.host_blocks}; recomputed {worker.recomputed_tokens}"
    )


def _journal(now: Stats) -> Text:
    journal = now.journal
    text = f"journal: {journal.store}, {journal.entries} entries, {journal.write_s * 1e3:.2f} ms a write"
    if journal.degraded:
        return Text(text + " – the store does not answer", style="bold red")
    if journal.store == "memory":
        return Text(text + " – NOT DURABLE", style="yellow")
    if journal.delivery == "relaxed":
        return Text(text + " – relaxed delivery", style="yellow")
    return Text(text, style="dim")
