"""Summary of the prompts that a shard has cached, in the form that clients can compare with a prompt.

Made only where there are several shards to choose from.
"""

from hashlib import blake2b

from quire.prompt_beginnings import beginnings_of, num_bytes_of, pack_hashes
from quire.v1 import cluster_pb2
from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.cached_prompts import CachedPrompts, PromptBeginning
from scheduler_svc.core.present_workers import PresentWorkers
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.requests.params.prompt_tokenizer import prompt_of


class CacheSummary:
    """One per leader of a shard."""

    def __init__(self, shard: int, workers: PresentWorkers) -> None:
        self._shard = shard
        self._prompts = CachedPrompts(workers)

    def record_admitted(self, request: pb.GenerateRequest, sequence: Sequence) -> None:
        """Record a prompt that was admitted, and its first sequence.

        A text's tokens are taken to be equally long: where a beginning ends among them is not known.
        """
        prompt = prompt_of(request)
        beginnings = beginnings_of(prompt, request.cache_salt, request.tenant)
        if not beginnings:
            return
        num_bytes = num_bytes_of(prompt)
        self._prompts.add(
            sequence,
            [
                PromptBeginning(each.short_hash, each.num_bytes * sequence.num_prompt_tokens // num_bytes)
                for each in beginnings
            ],
        )

    def to_pb(self) -> cluster_pb2.CachedBeginnings:
        """Summary of what is cached now. Equal contents have equal versions, whoever leads."""
        hashes = pack_hashes(self._prompts.hashes())
        version = int.from_bytes(blake2b(hashes, digest_size=8).digest(), "little") if hashes else 0
        return cluster_pb2.CachedBeginnings(shard=self._shard, version=version, hashes=hashes)
