"""Reference counts, the free list and the prefix cache of one pool."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_state_machine

from scheduler_svc.core.block_manager import BlockManager


def hashes(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_blocks_go_out_once_and_come_back() -> None:
    manager = BlockManager(4)
    table = manager.allocate(3)
    assert len(set(table)) == 3
    assert (manager.num_used_blocks, manager.num_free_blocks) == (3, 1)
    manager.check(Counter(table))
    manager.free(table)
    assert manager.num_available_blocks == manager.num_free_blocks == 4
    manager.check({})


def test_a_shared_block_is_used_until_its_last_holder_frees_it() -> None:
    manager = BlockManager(2)
    table = manager.allocate(1)
    manager.share(table)
    assert manager.ref_count(table[0]) == 2
    manager.free(table)
    assert manager.num_used_blocks == 1
    manager.free(table)
    assert manager.num_used_blocks == 0


def test_a_freed_block_with_a_hash_is_found_and_used_again() -> None:
    manager = BlockManager(3)
    table = manager.allocate(2)
    assert manager.register(table[0], b"x")
    manager.free(table)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (1, 2)
    assert manager.lookup(hashes("x", "y")) == [table[0]]
    assert manager.num_unreferenced([table[0]]) == 1
    manager.share([table[0]])
    assert (manager.num_used_blocks, manager.num_cached_blocks) == (1, 0)
    assert manager.num_unreferenced([table[0]]) == 0


def test_lookup_ends_at_the_first_gap() -> None:
    manager = BlockManager(3)
    a, b, c = manager.allocate(3)
    for block, name in [(a, b"a"), (c, b"c")]:
        manager.register(block, name)
    assert manager.lookup(hashes("a", "b", "c")) == [a]
    manager.register(b, b"b")
    assert manager.lookup(hashes("a", "b", "c")) == [a, b, c]
    assert manager.lookup(hashes("c")) == [c]


def test_free_blocks_go_before_cached_ones_and_those_from_the_least_recently_used_on() -> None:
    manager = BlockManager(4)
    first, second, third, plain = manager.allocate(4)
    for block in (first, second, third):
        manager.register(block, bytes([block]))
    manager.free([second])
    manager.free([first])
    manager.free([third])
    manager.share([second])  # used again ...
    manager.free([second])  # ... so it is the most recently used now
    manager.free([plain])
    assert manager.allocate(4) == [plain, first, third, second]
    assert manager.lookup([bytes([first])]) == []
    manager.check(Counter(range(4)))


def test_a_table_is_evicted_from_its_tail() -> None:
    manager = BlockManager(3)
    table = manager.allocate(3)
    for block in table:
        manager.register(block, bytes([block]))
    manager.free(table)
    assert manager.allocate(3) == table[::-1]


def test_of_two_blocks_with_one_hash_the_first_keeps_it() -> None:
    manager = BlockManager(2)
    first, second = manager.allocate(2)
    assert manager.register(first, b"same")
    assert not manager.register(second, b"same")
    assert manager.lookup([b"same"]) == [first]
    manager.free([second])
    assert manager.num_free_blocks == 1
    assert manager.num_cached_blocks == 0


def test_an_unregistered_block_is_not_found_and_not_kept() -> None:
    manager = BlockManager(1)
    (block,) = manager.allocate(1)
    manager.register(block, b"x")
    manager.unregister(block)
    assert manager.lookup([b"x"]) == []
    manager.free([block])
    assert manager.num_free_blocks == 1


def test_blocks_that_others_hold_do_not_come_free_with_a_table() -> None:
    manager = BlockManager(3)
    a, b, c = manager.allocate(3)
    manager.share([a, b])
    manager.share([a])
    # References: a 3, b 2, c 1.
    assert manager.num_freed_by([[a, b, c]]) == 1
    assert manager.num_freed_by([[a, b, c], [a, b]]) == 2
    assert manager.num_freed_by([]) == 0


@pytest.mark.parametrize("misuse", ["free twice", "allocate too much", "register a free block", "two hashes"])
def test_misuse_is_caught(misuse: str) -> None:
    manager = BlockManager(1)
    (block,) = manager.allocate(1)
    with pytest.raises(AssertionError):
        if misuse == "free twice":
            manager.free([block, block])
        elif misuse == "allocate too much":
            manager.allocate_block()
        elif misuse == "register a free block":
            manager.free([block])
            manager.register(block, b"x")
        else:
            manager.register(block, b"x")
            manager.register(block, b"y")


def test_a_leak_and_a_wrong_count_are_caught() -> None:
    manager = BlockManager(2)
    table = manager.allocate(1)
    with pytest.raises(AssertionError, match="ref_count 1, 0 holders"):
        manager.check({})
    with pytest.raises(AssertionError, match="ref_count 1, 2 holders"):
        manager.check({table[0]: 2})


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockManager(0)


class BlockManagerMachine(RuleBasedStateMachine):
    """Tables of random content, against a model that keeps holders, hashes and the order of eviction."""

    @initialize(num_blocks=st.integers(1, 24))
    def create(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks)
        self.tables: list[list[int]] = []
        self.hash_of: dict[int, bytes] = {}
        self.evictable: list[int] = []  # least recently used first

    def holders(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        num_blocks = data.draw(st.integers(0, self.manager.num_available_blocks))
        used = self.holders()
        num_evicted = max(0, num_blocks - self.manager.num_free_blocks)
        evicted, self.evictable = self.evictable[:num_evicted], self.evictable[num_evicted:]
        for block in evicted:
            del self.hash_of[block]
        table = self.manager.allocate(num_blocks)
        assert len(set(table)) == num_blocks and not used.keys() & set(table)
        assert not self.hash_of.keys() & set(table), "a block that is still cached went out"
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.integers(0, 30))
    def register(self, data: st.DataObject, name: int) -> None:
        unhashed = sorted(self.holders().keys() - self.hash_of.keys())
        if unhashed:
            block = data.draw(st.sampled_from(unhashed))
            is_new = bytes([name]) not in self.hash_of.values()
            assert self.manager.register(block, bytes([name])) == is_new
            if is_new:
                self.hash_of[block] = bytes([name])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        hashed = sorted(self.holders().keys() & self.hash_of.keys())
        if hashed:
            block = data.draw(st.sampled_from(hashed))
            self.manager.unregister(block)
            del self.hash_of[block]

    @rule(name=st.integers(0, 30))
    def forget(self, name: int) -> None:
        named = [block for block, block_hash in self.hash_of.items() if block_hash == bytes([name])]
        assert self.manager.find(bytes([name])) == (named[0] if named else None)
        self.manager.forget(bytes([name]))
        for block in named:
            del self.hash_of[block]
        self.evictable = [block for block in self.evictable if block not in named]

    @rule(names=st.lists(st.integers(0, 30), max_size=4, unique=True))
    def look_up_and_share(self, names: list[int]) -> None:
        block_of = {block_hash: block for block, block_hash in self.hash_of.items()}
        expected: list[int] = []
        for name in names:
            if bytes([name]) not in block_of:
                break
            expected.append(block_of[bytes([name])])
        found = self.manager.lookup(bytes([name]) for name in names)
        assert found == expected
        assert self.manager.num_unreferenced(found) == len(set(found) & set(self.evictable))
        self.manager.share(found)
        self.evictable = [block for block in self.evictable if block not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        held = self.holders()
        num_available = self.manager.num_available_blocks
        num_freed = self.manager.num_freed_by([table])
        self.manager.free(table)
        assert self.manager.num_available_blocks == num_available + num_freed
        self.evictable += [block for block in table[::-1] if block in self.hash_of and not held[block]]

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        manager.check(self.holders())
        assert manager.num_used_blocks == len(self.holders())
        assert manager.num_cached_blocks == len(self.evictable)
        assert {block for block in range(manager.num_blocks) if manager.is_findable(block)} == self.hash_of.keys()
        found = {name for name in range(31) if manager.is_cached(bytes([name]))}
        assert found == {name for (name,) in self.hash_of.values()}
        total = manager.num_used_blocks + manager.num_cached_blocks + manager.num_free_blocks
        assert total == manager.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for table in self.tables:
                self.manager.free(table)
            self.manager.check({})
            assert self.manager.num_available_blocks == self.manager.num_blocks


def test_random_operations_leak_nothing_and_evict_in_order() -> None:
    run_state_machine(
        BlockManagerMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=50,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
