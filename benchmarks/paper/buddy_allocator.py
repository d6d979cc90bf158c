"""A buddy allocator: contiguous ranges whose sizes are powers of two, halved when given out, merged when given back.

A pool whose size is no power of two is made of the largest ones that it holds. It knows nothing of requests.
"""

from heapq import heapify, heappop, heappush


class BuddyAllocator:
    """Allocator that returns the lowest suitable address. A range of size s begins at a multiple of s."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = num_slots
        self._free: list[list[int]] = [[] for _ in range(num_slots.bit_length())]  # heaps of addresses, by order
        self._order_at: dict[int, int] = {}  # of what is given out
        address = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].append(address)
                address += 1 << order

    def allocate(self, size: int) -> int | None:
        """Allocate at least `size` slots; return their address, or None if there is no such range."""
        order = (size - 1).bit_length()
        for larger in range(order, len(self._free)):
            if self._free[larger]:
                address = heappop(self._free[larger])
                for half in reversed(range(order, larger)):
                    heappush(self._free[half], address + (1 << half))
                self._order_at[address] = order
                self.num_free -= 1 << order
                return address
        return None

    def free(self, address: int) -> None:
        """Give back a range, by its address."""
        order = self._order_at.pop(address)
        self.num_free += 1 << order
        while (buddy := address ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            heapify(self._free[order])
            address = min(address, buddy)
            order += 1
        heappush(self._free[order], address)

    def free_ranges(self) -> list[tuple[int, int]]:
        """Free ranges as (address, size), in order of addresses."""
        return sorted((address, 1 << order) for order, heap in enumerate(self._free) for address in heap)
