"""Forward pass on a CPU: packed products, and between them kernels that work in place or into reused buffers.

The first pass calls kernel by kernel. If all kernels are native, the pass is recorded, and later passes are one call.
Reads and writes the KV pool that it is given, whose blocks have the layout of the kernels. Knows no sequences and
samples nothing.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.paged_attention import RaggedRows
from kernels.native.cpu_kernels import (
    CacheShape,
    CpuKernels,
    CpuPlan,
    GreedyTokens,
    LayerCache,
    NormRule,
    layer_caches,
)
from kernels.native.native_kernels import NativeKernels
from kernels.native.packed_product import PackedProduct
from kernels.native.program import Program, recording
from kernels.native.shared_ranks import RankReduction, SharedRanks
from kernels.sampling.sampling_operations import SamplingOperations
from worker_svc.cpu.layer_rules import LayerRules, norm_rule
from worker_svc.cpu.row_buffers import RowBuffers
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.config import ModelConfig, NormPlace
from worker_svc.model.decoder import Decoder
from worker_svc.model.layers import Attention, DecoderLayer, Mlp

# For each of `ForwardBatch.logit_rows`: the token of the greatest logit, and True if all logits are finite.
GreedyChoice = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


class HostDecoder:
    """A decoder's weights, and the buffers of its passes. The next pass overwrites the result of a pass."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: CpuKernels,
        ranks: RankReduction | None = None,
        *,
        num_positions: int | None = None,
    ) -> None:
        """Takes the memory of the rotary table, as far as positions are computed: all of the model's by default.

        `ranks`: the group among which the model of a part is divided; all its ranks compute the same passes.
        """
        assert (ranks is None) == decoder.model_part.is_whole, "a part is computed by a group"
        self.before_pass: Callable[[], None] = lambda: None  # called just before a pass runs its kernels
        self._weights = decoder
        self._kernels = kernels
        self._ranks = ranks
        self._vocabulary = decoder.model_part.span_of(decoder.config.vocab_size)
        self._buffers = RowBuffers(decoder.dtype)
        self._logits = RowBuffers(decoder.dtype)
        self._activation = decoder.config.activation
        self._rotary = _rotary_table(decoder, num_positions or decoder.config.max_model_len)
        self._layers = tuple(LayerRules.of(layer) for layer in decoder.layers)
        self._final_norm = None if decoder.final_norm is None else norm_rule(decoder.final_norm)
        self._is_embedding_plain = decoder.project_in is None and decoder.position_embedding is None
        self._pool: KVPool | None = None  # the pool of `_caches`
        self._caches: tuple[LayerCache, ...] = ()
        self._chosen = GreedyTokens(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
        # If native kernels compute all layers, passes are recorded: one program for each way to compute the last layer,
        # with greedy choice or without.
        is_native = ranks is None or isinstance(ranks, SharedRanks)
        self._native = kernels if is_native and isinstance(kernels, NativeKernels) and _is_native(decoder) else None
        has_native_head = ranks is None and decoder.project_out is None
        self._native_head = decoder.head if has_native_head and isinstance(decoder.head, PackedProduct) else None
        self._programs: dict[tuple[bool, bool, bool], Program] = {}
        self._num_moves = 0  # value of the buffers' `num_moves` when the programs were recorded

    @property
    def config(self) -> ModelConfig:
        return self._weights.config

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.device

    @property
    def sampling(self) -> SamplingOperations:
        """Operations that turn this decoder's logits into tokens."""
        return self._kernels.sampling

    def block_shape(self, block_size: int, kv_dtype: torch.dtype | None = None) -> BlockShape:
        """See Decoder.block_shape."""
        return self._weights.block_shape(block_size, kv_dtype)

    def reserve(self, num_rows: int) -> None:
        """Reserve buffers for passes of up to `num_rows` tokens. If they move, recorded programs are dropped."""
        self._buffers.reserve(num_rows)
        if self._buffers.num_moves != self._num_moves:
            self._programs, self._num_moves = {}, self._buffers.num_moves
            tokens, finite = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
            self._chosen = GreedyTokens(tokens, finite)

    def take_memory(self) -> None:
        """Have the system back the reserved memory of buffers that a pass has used."""
        self._buffers.take_memory()

    def forward(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Compute the batch's tokens, write their keys and values, return logits [L, vocab_size] in the model's dtype.

        Only the rows in `batch.logit_rows` go through the head. Earlier tokens of the rows, and blocks that are copied
        or swapped in, must be in the cache before.
        """
        return self.logits(self.hidden(batch, kv_pool))

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Hidden states for the head, as `forward` computes them: [L, hidden_size], normalised."""
        hidden = self._compute(batch, kv_pool, chooses=False)
        if hidden is not None:
            return hidden
        last_buffer = "layer_out" if self._final_norm is None else "final"
        return self._buffers.of(last_buffer, len(batch.logit_rows), self.config.hidden_size)

    @torch.inference_mode()
    def greedy(self, batch: ForwardBatch, kv_pool: KVPool) -> GreedyChoice:
        """`forward`, and the greedy token of each row, [L]; token 0 if a row is not finite.

        The next call overwrites the result.
        """
        if self._native is None or self._native_head is not None:
            self._compute(batch, kv_pool, chooses=True)
        else:
            self._choose(self.hidden(batch, kv_pool))
        num_rows = len(batch.logit_rows)
        return self._chosen.token_ids.numpy()[:num_rows], self._chosen.is_finite.numpy()[:num_rows]

    def _compute(self, batch: ForwardBatch, kv_pool: KVPool, *, chooses: bool) -> Tensor | None:
        """Compute a pass up to the head, or up to the greedy choice; record it the first time, if it can be recorded.

        Returns hidden states [L, hidden_size], or None if the pass was one call, which leaves them in their buffer.
        """
        self._look_at(kv_pool)
        wants_all = _wants_all(batch)
        wanted = None if wants_all else batch.logit_rows
        plans = self._plan(batch)
        last_plan = self._plan_of_wanted(batch) if wanted is not None else None
        way = wants_all, last_plan is not None, chooses
        self.reserve(len(batch.token_ids))
        x = None if self._is_embedding_plain else self._embed(batch)
        program = self._programs.get(way)
        self.before_pass()
        if program is not None:
            program.run(batch.token_ids, batch.positions, batch.slot_mapping, wanted, batch.max_context_len)
            return None
        if self._native is not None and len(batch.logit_rows):  # without rows there are no addresses to record
            program = self._native.new_program()
        with nullcontext() if program is None else recording(program):
            hidden = self._layers_of(x, batch, plans, wanted, last_plan)
            if chooses:
                self._choose(hidden)
        if program is not None:  # only now: an exception would leave half a program
            self._programs[way] = program
        return hidden

    def _choose(self, hidden: Tensor) -> None:
        chosen = GreedyTokens(*(each[: len(hidden)] for each in self._chosen))
        if self._native_head is not None:
            self._native_head.choose(hidden, chosen)
        else:
            self._kernels.greedy(self.logits(hidden), chosen)

    def _layers_of(
        self,
        x: Tensor | None,
        batch: ForwardBatch,
        plans: dict[int | None, CpuPlan],
        wanted: Tensor | None,
        last_plan: CpuPlan | None,
    ) -> Tensor:
        """Compute all layers, kernel by kernel.

        x: [T, hidden_size], embedded, or None to embed here; wanted: tokens whose results are wanted, or None for all
        last_plan: of the wanted queries alone, for the last layer; None: it attends for all
        """
        x = self._embed(batch) if x is None else x
        residual = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._weights.layers):
            tokens = _LayerTokens(
                self._caches[index],
                plans[self.config.sliding_windows[index]],
                batch.positions,
                batch.slot_mapping,
                wanted if index == last else None,
                last_plan if index == last else None,
            )
            step = self._norm_before if layer.norm_place is NormPlace.BEFORE else self._norm_after
            x, residual = step(layer, self._layers[index], x, residual, tokens)
        if self._final_norm is not None:
            return self._norm(self._final_norm, x, residual, "final")
        return x if residual is None else residual.add_(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head to any rows of `hidden`: logits [..., vocab_size] in the model's dtype.

        In a group rank 0 gets them; the others get those of their own part of the vocabulary.
        """
        num_rows, vocab_size = len(hidden), self.config.vocab_size
        if self._weights.project_out is not None:
            hidden = self._weights.project_out(hidden)
        if self._ranks is None:
            return self._weights.head(hidden, self._logits.of("logits", num_rows, vocab_size))
        if self._ranks.rank:
            own = self._weights.head(hidden, self._logits.of("own_logits", num_rows, self._vocabulary.size))
            self._ranks.collect_columns(own, None, vocab_size)
            return own
        logits = self._logits.of("logits", num_rows, vocab_size)
        own = self._weights.head(hidden, logits[:, : self._vocabulary.end])
        self._ranks.collect_columns(own, logits, vocab_size)
        return logits

    def _look_at(self, kv_pool: KVPool) -> None:
        if kv_pool is self._pool:
            return
        assert kv_pool.shape.dtype in (self.dtype, torch.int8), "e4m3 is for the device runner alone"
        config = self.config
        shape = CacheShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=kv_pool.block_size,
            dtype=self.dtype,
            int8=kv_pool.shape.dtype == torch.int8,
        )
        self._caches, self._pool, self._programs = layer_caches(kv_pool.blocks, shape), kv_pool, {}

    def _plan(self, batch: ForwardBatch) -> dict[int | None, CpuPlan]:
        """Make one plan for all layers with the same window."""
        rows, any_layer = batch.rows, self._caches[0]
        return {
            window: self._kernels.plan(rows, any_layer, window) for window in dict.fromkeys(self.config.sliding_windows)
        }

    def _plan_of_wanted(self, batch: ForwardBatch) -> CpuPlan | None:
        """Plan of the wanted queries in the last layer, or None if they cannot be attended by themselves.

        Native kernels compute a query with the same bits whatever others are beside it.
        """
        rows = None if self._native is None else _last_queries(batch)
        if rows is None:
            return None
        return self._kernels.plan(rows, self._caches[0], self.config.sliding_windows[-1], is_second=True)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        weights, num_tokens = self._weights, len(batch.token_ids)
        hidden = self._buffers.of("embedded", num_tokens, self.config.embed_dim)
        self._kernels.embed(weights.token_embedding, batch.token_ids, hidden, self._vocabulary.begin)
        if weights.project_in is not None:
            hidden = weights.project_in(hidden, self._buffers.of("projected", num_tokens, self.config.hidden_size))
        if weights.position_embedding is not None:
            places = batch.positions + self.config.position_offset
            if self._ranks is None:
                hidden += weights.position_embedding.index_select(0, places)
            else:
                hidden += self._own_positions(weights.position_embedding, places)
        return self._summed(hidden)

    def _own_positions(self, table: Tensor, places: Tensor) -> Tensor:
        """Embeddings of the positions in this rank's part of the table; zeros for the others."""
        first = self._weights.model_part.span_of(self.config.position_offset + self.config.max_model_len).begin
        rows = self._buffers.of("positions", len(places), self.config.hidden_size)
        self._kernels.embed(table, places, rows, first)
        return rows

    def _summed(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks, in place."""
        if self._ranks is not None:
            self._ranks.sum_rows(x)
        return x

    def _norm_before(
        self, layer: DecoderLayer, rules: LayerRules, x: Tensor, residual: Tensor | None, tokens: "_LayerTokens"
    ) -> tuple[Tensor, Tensor]:
        """Output of the layer, and the residual to add it to."""
        normed = self._norm(rules.attention_norm, x, residual, "normed")
        residual = x if residual is None else residual
        x = self._attend(layer.attention, rules, normed, tokens)
        if tokens.wanted is not None:
            residual = self._gather(residual, tokens.wanted, "wanted_residual")
        normed = self._norm(rules.mlp_norm, x, residual, "normed")
        return self._mlp(layer.mlp, normed), residual

    def _norm_after(
        self, layer: DecoderLayer, rules: LayerRules, x: Tensor, residual: Tensor | None, tokens: "_LayerTokens"
    ) -> tuple[Tensor, None]:
        assert residual is None, "layers of one decoder normalise all before or all after"
        attended = self._attend(layer.attention, rules, x, tokens)
        if tokens.wanted is not None:
            x = self._gather(x, tokens.wanted, "wanted_residual")
        middle = self._norm(rules.attention_norm, attended, x, "normed")
        return self._norm(rules.mlp_norm, self._mlp(layer.mlp, middle), middle, "layer_out"), None

    def _attend(self, attention: Attention, rules: LayerRules, x: Tensor, tokens: "_LayerTokens") -> Tensor:
        """Attention of all tokens, then the output product of the wanted ones."""
        num_tokens, config, kernels = len(x), self.config, self._kernels
        qkv = attention.qkv(x, self._buffers.of("qkv", num_tokens, config.query_size + 2 * config.kv_size))
        if rules.projection_norms is not None:
            heads = qkv[:, : config.query_size], qkv[:, config.query_size : config.query_size + config.kv_size]
            for part, norm, buffer in zip(heads, rules.projection_norms, ("all_queries", "all_keys"), strict=True):
                self._norm_projection(part, norm, buffer)
        kernels.rotate_and_write(
            qkv, self._rotary, tokens.positions, tokens.slot_mapping, tokens.cache, rules.head_norms
        )
        queries, plan = qkv[:, : config.query_size], tokens.plan
        if tokens.wanted is not None and tokens.wanted_plan is not None:
            queries, plan = self._gather(queries, tokens.wanted, "wanted_queries"), tokens.wanted_plan
        out = self._buffers.of("attended", len(queries), config.query_size)
        kernels.attend(queries, tokens.cache, plan, config.attention_scale, out)
        if tokens.wanted is not None and tokens.wanted_plan is None:
            out = self._gather(out, tokens.wanted, "wanted_attended")
        return self._summed(attention.out(out, self._buffers.of("attention_out", len(out), config.hidden_size)))

    def _norm_projection(self, part: Tensor, norm: NormRule, buffer: str) -> None:
        """Norm of all heads of a token as one vector, of which `part` has those of this rank; in place."""
        if self._ranks is None:
            self._kernels.add_norm(part, None, norm, part)
            return
        size = part.shape[1]
        every = self._buffers.of(buffer, len(part), size * self._ranks.size)
        self._ranks.join_columns(part, every)
        self._kernels.add_norm(every, None, norm, every)
        self._kernels.copy_rows(every[:, self._ranks.rank * size : (self._ranks.rank + 1) * size], part)

    def _mlp(self, mlp: Mlp, x: Tensor) -> Tensor:
        num_rows, size = len(x), self.config.intermediate_size
        if mlp.gated:
            inner = self._buffers.of("inner", num_rows, size)
            self._kernels.gated_activation(
                mlp.up(x, self._buffers.of("gate_up", num_rows, 2 * size)), self._activation, inner
            )
        else:
            inner = mlp.up(x, self._buffers.of("inner", num_rows, size))
            self._kernels.activation(inner, self._activation, inner)
        return self._summed(mlp.down(inner, self._buffers.of("mlp_out", num_rows, self.config.hidden_size)))

    def _gather(self, x: Tensor, rows: Tensor, buffer: str) -> Tensor:
        out = self._buffers.of(buffer, len(rows), x.shape[1])
        self._kernels.gather_rows(x, rows, out)
        return out

    def _norm(self, rule: NormRule, x: Tensor, residual: Tensor | None, buffer: str) -> Tensor:
        """Norm of x; with a residual, add x to it in place first."""
        out = self._buffers.of(buffer, *x.shape)
        self._kernels.add_norm(x, residual, rule, out)
        return out


class _LayerTokens(NamedTuple):
    """Inputs of a layer beside the hidden states of its tokens."""

    cache: LayerCache
    plan: CpuPlan
    positions: Tensor
    slot_mapping: Tensor
    wanted: Tensor | None  # tokens to compute after attention; None: all
    wanted_plan: CpuPlan | None  # of their queries alone; None: all are attended


def _is_native(decoder: Decoder) -> bool:
    """True if native kernels compute all layers, given that norms, activations and attention are native."""
    products = (
        each
        for layer in decoder.layers
        for each in (layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down)
    )
    sums_at_the_end = decoder.final_norm is None and any(
        layer.norm_place is NormPlace.BEFORE for layer in decoder.layers
    )
    return not sums_at_the_end and all(isinstance(each, PackedProduct) for each in products)


def _wants_all(batch: ForwardBatch) -> bool:
    num_tokens = len(batch.token_ids)
    return len(batch.logit_rows) == num_tokens and batch.logit_rows.tolist() == list(range(num_tokens))


def _last_queries(batch: ForwardBatch) -> RaggedRows | None:
    """Rows with their last queries alone, if these are the wanted tokens, in order; else None."""
    ends, wanted = batch.query_start.numpy()[1:], batch.logit_rows.numpy()
    rows = np.searchsorted(ends, wanted, side="right")
    if np.count_nonzero(ends[rows] - 1 != wanted) or np.count_nonzero(rows[1:] <= rows[:-1]):
        return None
    query_start = np.zeros(len(ends) + 1, dtype=np.int32)
    query_start[rows + 1] = 1
    np.cumsum(query_start, out=query_start)
    return replace(batch.rows, query_start=torch.from_numpy(query_start), max_query_len=1)


def rotary_bytes(config: ModelConfig, num_positions: int) -> int:
    """Bytes of the table of rotary angles; 0 for a model without them."""
    return 0 if config.rope is None else num_positions * config.head_dim * torch.float32.itemsize


def _rotary_table(decoder: Decoder, num_positions: int) -> Tensor | None:
    """Cosines, then sines, of each position's rotary angles, [num_positions, head_dim] float32."""
    if decoder.inverse_frequencies is None:
        return None
    half = len(decoder.inverse_frequencies)
    table = torch.empty(num_positions, 2 * half)
    decoder.write_rotary(table[:, :half], table[:, half:])
    return table
