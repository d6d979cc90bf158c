"""Words of `docs/scaling.md` that no figure changes: what is real and what is assumed, and what this size has shown."""

WHAT = """\
How large a deployment can be, how many schedulers, workers and gateways it takes, and what happens when a rack is \
lost: the real code that decides, in virtual time, with simulated processes. This page is made by `make bench-fleet` \
from `benchmarks/results/fleet.json`; nobody edits it. Everything random has a seed and no clock is read, so two runs \
give the same figures on any machine; the few that are measured where it runs say so."""

REAL = (
    "**Real code**: the scheduler's core (`scheduler_svc/core`: queue, block manager with prefix cache, planning, "
    "placement, preemption, isolation), one for each shard; who leads what and which worker moves "
    "(`leadership/shard_choice.py`, `api/worker_shares.py`); where clients send (`quire/shard_router.py` with "
    "`shards.py` and `prefix_memory.py`). After each simulation every invariant of every core is checked, and that no "
    "request is lost.",
    "**Steps of workers** are modelled. *8 ms a step* is the worker of the "
    "[measured throughput of shards](results.md#shards). *8 B on a GPU* is arithmetic, not a measurement: a model of "
    "8 B parameters in bfloat16 on an H200, {step_ms:.2f} ms + {row_us:.1f} µs × rows + {context_ns:.0f} ns × "
    "tokens of "
    "context + {prompt_us:.0f} µs × prompt tokens, the line through a review's estimates of this project's kernels "
    "(5.05 ms for 1 row at 2,048 tokens, 16 ms for 256 at 1,024, 25 ms for 256 at 2,048; the one it is not made of, "
    "32 rows at 2,048, it gives as 7.5 ms for 6.9 to 7.2).",
    "**CPU time of a scheduler's process** is charged from measurements of real processes, one core, one thing after "
    "another: a step by its rows ({points}; straight lines between them, and proportional beyond), of which "
    "{turn:.0%} passes before the next step is sent; {request_us:.0f} µs for a request; {rebuild_us:.0f} µs for "
    "each live "
    "request that a new leader rebuilds. Sources: `shard_throughput.json`, `overhead.json`, "
    "`recovery_time.json`. Delivery to several workers' clients at once is cheaper than the sum that is charged, and "
    "journal writes of several workers share entries: so these figures are on the safe side.",
    "**Requests**: lengths as in the paper's ShareGPT trace (161 tokens in, 338 out), half of them behind one of 512 "
    "prefixes of 128 tokens. Closed loop: each client sends its next request when it has the last token, so the "
    "number of "
    "live requests stays. At the start each has only a part of its output left. {live} live requests a worker, where "
    "nothing else is said; 4,096 blocks of 16 tokens.",
    "**Times**: 0.1 ms for a message, 0.1 ms for the journal, a lease of 1.5 s, registration every 2 s, a lost host is "
    "noticed after 1.8 s, loads are published every 0.5 s and seen when the store is looked at.",
    "**Simplified**: the store answers always and at once. Tokens that a leader had decided and not yet published when "
    "it died count as delivered (a few milliseconds of them). Processes look at the store at eight different moments. "
    "Gateways are free where they are not asked about, and have no limit to what they hold. CPU time is that of the "
    "machine of the measurements; another one shifts every limit of a scheduler by its factor.",
)

BOTTLENECK = """\
The first limit is the CPU of the scheduler's process, one core of Python: most of its time goes to text, journal and \
delivery of tokens, and a small part to the decision (the core's own time is below). Until it is full, tokens/s grow \
with workers and shards alike; from then on only shards help. What moves the limit, for ten workers of one scheduler:"""

FOUND = (
    "Workers moved one at a time in the whole deployment, since only the single richest shard gave one away, in two "
    "to four "
    "seconds: the dozens that a lost rack leaves to do would take minutes. Mended: the richest give to the poorest "
    "in pairs.",
    "A scheduler that looked first stood by for every shard in need: after a lost rack, and at a start, one got "
    "them all "
    "(93 of 100), and handed them over one by one. Mended: each takes its share, and a leader hands one over to each "
    "scheduler that stands by.",
    "Workers that started at once all went to the shards that had the fewest when loads were last published; some "
    "had 127 "
    "of 1,000 workers. Mended: of more than eight shards two are drawn by the worker's id.",
    "Each scheduler read each shard four times a second, in two round trips, over a connection of its own: with 100 of "
    "each 80,000 round trips a second, and 10,000 connections, the default limit of a store. Mended: one round trip "
    "for "
    "all shards over one connection, less often the more there are. So a store is asked for "
    "4 × schedulers × shards ÷ look commands a second: {store_100:,.0f} for 100 of each, in {trips_100:.0f} round "
    "trips.",
    "Not mended: clients compare all shards for each new request, and schedulers all shards at each look; both are "
    "linear, "
    "and cheap at this size (the last table). Every client's `Topology` stream carries all shards: some 4 KB at 100 "
    "shards, "
    "up to four times a second, made for each client anew.",
    "Not mended: clients see loads that are as old as a look (1.6 s at 100 shards, 4.7 s at 300), and every gateway "
    "learns "
    "prefixes by itself. That costs a few percent of the tokens/s, and most of the p99 of the time to first token: "
    "shards "
    "are loaded unevenly, and so are their workers.",
    "Not mended: the shards of lost schedulers wait for the lease, for being noticed, and for another lease: twice "
    "as long "
    "as with a standby for each shard. A standby for every shard of a rack costs one scheduler for each.",
)
