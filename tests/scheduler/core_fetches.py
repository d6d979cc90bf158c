"""Blocks that a worker without a model has fetched from another, until a step places them."""

Slot = tuple[int, int] | None  # KV of a token, as in `core_executor`; None: never written
Triple = tuple[int, int, int]  # (fetch, index in it, device block)


class FetchedKv:
    """Blocks that have come, by fetch. The test delivers it: there is no wire."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[int, list[list[Slot] | None]] = {}  # None: placed before
        self._sizes: dict[int, int] = {}  # of the fetches, come or not

    @property
    def num_kept(self) -> int:
        """Number of fetches that take memory."""
        return len(self._blocks)

    def deliver(self, fetch_id: int, contents: list[list[Slot]], num_blocks: int) -> None:
        """Take the first of `num_blocks` blocks of a fetch, in its order, `FakeWorker.block_kv` of each."""
        assert fetch_id >= 1 and all(len(block) == self._block_size for block in contents)
        self._blocks[fetch_id] = [list(block) for block in contents]
        self._sizes[fetch_id] = num_blocks

    def forget(self, fetch_id: int) -> None:
        """Drop what has come: the call of the fetch has ended, or a step has placed its last block."""
        self._blocks.pop(fetch_id, None)

    def has_come(self, placed: list[int]) -> bool:
        """False if a step that places these blocks is answered with NEED_SNAPSHOT."""
        kept = self._blocks
        return all(fetch in kept and any(kept[fetch][index : index + 1]) for fetch, index, _ in _triples(placed))

    def place(self, placed: list[int], kv: list[Slot]) -> None:
        """Write blocks to the pool, and forget their fetches."""
        assert self.has_come(placed), "a step places blocks that have not come: see has_come"
        assert len(set(placed[2::3])) == len(placed[2::3]), "two fetched blocks for one block of the pool"
        for fetch, index, block in _triples(placed):
            start, end = block * self._block_size, (block + 1) * self._block_size
            assert index >= 0 and 0 <= start < len(kv)
            content = self._blocks[fetch][index]
            assert content is not None
            kv[start:end] = content
        self._take(placed)

    def scramble(self, placed: list[int], kv: list[Slot]) -> None:
        """The step that places them fails in the middle: garbage is in the pool, and the fetches are gone."""
        for _, _, block in _triples(placed):
            kv[block * self._block_size : (block + 1) * self._block_size] = [None] * self._block_size
        self._take(placed)

    def _take(self, placed: list[int]) -> None:
        for fetch, index, _ in _triples(placed):
            if fetch in self._blocks:
                self._blocks[fetch][index] = None
                if index == self._sizes[fetch] - 1:
                    self.forget(fetch)


def _triples(placed: list[int]) -> list[Triple]:
    return list(zip(placed[::3], placed[1::3], placed[2::3], strict=True))
