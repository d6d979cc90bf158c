"""Thread that owners share, in turn: one with much work keeps no other waiting.

It takes its next work by itself: through the event loop that asked, each would wait for the loop's other work. Knows no
tenants, and not the work.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class SharedThread:
    """Does one work after another: of each owner the first that is left, in the order in which the owners came.

    Keeps nothing of an owner without any.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._lock = Lock()
        # By owner, of those with work that has not begun; the next in turn first.
        self._works: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    async def run(self, owner: str, work: Callable[[*Arguments], T], *args: *Arguments) -> T:
        """Have the work done, and return its result. Given up before its turn it is left out."""
        future: Future[T] = Future()
        with self._lock:
            self._works.setdefault(owner, deque()).append((future, partial(work, *args)))
        self._executor.submit(self._do_next)  # one call for each work, of whichever owner it then is
        return await asyncio.wrap_future(future)

    def _do_next(self) -> None:
        with self._lock:
            owner, works = next(iter(self._works.items()))
            future, work = works.popleft()
            if works:
                self._works.move_to_end(owner)
            else:
                del self._works[owner]
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # of a native library, too
            future.set_exception(error)
        else:
            future.set_result(result)
