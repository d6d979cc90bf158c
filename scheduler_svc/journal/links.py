"""Choice of a link to the store by its URL: to one server, or to a cluster."""

from collections.abc import Sequence
from typing import Any, Protocol

from quire.redaction import has_password, without_passwords
from quire.store_url import is_cluster
from scheduler_svc.journal.cluster_link import ClusterLink
from scheduler_svc.journal.redis_link import Packed, RedisLink, StoreOptionError
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError


class StoreLink(Protocol):
    """Commands of one shard, or of several, for the store. RedisLink and ClusterLink have the details."""

    async def call(self, command: Packed, *, answer_bytes: int = 0) -> Any:
        """Send one command and return its reply."""

    async def call_many(
        self, commands: Sequence[Packed], *, then: Sequence[Packed] = (), answer_bytes: int = 0
    ) -> list[Any]:
        """Send commands of one shard, `then` behind them on the same connection; return all replies."""

    async def call_each(self, batches: Sequence[Sequence[Packed]]) -> list[list[Any] | StoreUnavailableError]:
        """Send a batch for each shard; return the replies of each, or why it has none."""

    async def call_nodes(self, commands: Sequence[Packed]) -> dict[str, list[Any] | StoreUnavailableError]:
        """Send commands without keys to every node that keeps the first shard; return the answers by address."""

    async def confirm_owner(self) -> None:
        """Return if the node that answers for the first shard is its own, as the other nodes say, too.

        Raises StoreUnavailableError if another is, or nobody says.
        """

    async def close(self) -> None:
        """Drop every connection."""


def open_link(
    url: str, keys: Sequence[str], *, timeout_s: float, repeatable: bool, reports_moves: bool = False
) -> StoreLink:
    """Make a link, which connects when it is used. Raises StoreConfigurationError if the URL is malformed.

    `keys`: one of each shard. The other arguments are those of ClusterLink and RedisLink.
    """
    try:
        if is_cluster(url):
            return ClusterLink(url, keys, timeout_s=timeout_s, repeatable=repeatable, reports_moves=reports_moves)
        return RedisLink(url, timeout_s=timeout_s, repeatable=repeatable, reports_moves=reports_moves)
    except ValueError as error:
        is_of_password = "@" in url.partition("?")[2]  # where it has a question mark, "options" are a part of it
        is_option = isinstance(error, StoreOptionError) and not is_of_password
        may_show = has_password(url) and not is_cluster(url) and not is_option  # a part of it
        why = "it has no valid port or database number" if may_show else str(error)
        raise StoreConfigurationError(f"store {without_passwords(url)!r} cannot be used: {why}") from None
