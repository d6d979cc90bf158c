"""The oldest requests of a deployment that have not ended, from the listings of all its shards."""

from collections.abc import Sequence

import quire
from quire.merging import begins_shard, token_of_shard
from quire.shards import led_shards

PAGE_SIZE = 1000


def oldest_requests(
    client: quire.Client, limit: int, tenant: str | None = None, state: Sequence[str] | None = None
) -> tuple[list[quire.RequestSummary], bool]:
    """List up to `limit` requests, the oldest first; the flag is True if there are more."""
    shards = client.shards()
    found: list[quire.RequestSummary] = []
    has_more = False
    for shard in led_shards(shards):
        listed, is_cut = _of_shard(client, shard.number, token_of_shard(shard.number, shards), limit, tenant, state)
        found += listed
        has_more = has_more or is_cut
    found.sort(key=lambda each: each.age_s, reverse=True)
    return found[:limit], has_more or len(found) > limit


def _of_shard(
    client: quire.Client, shard: int, token: str | None, limit: int, tenant: str | None, state: Sequence[str] | None
) -> tuple[list[quire.RequestSummary], bool]:
    """List up to `limit` requests of a shard, page by page from the one of the token; True if it has more."""
    found: list[quire.RequestSummary] = []
    while True:
        size = min(PAGE_SIZE, limit - len(found))
        try:
            page = client.list_requests(tenant=tenant, state=state, page_size=size, page_token=token)
        except quire.UnavailableError:
            if any(each.number == shard for each in led_shards(client.shards())):
                raise
            return found, False  # the shard has just lost its leader
        except quire.InvalidRequestError as error:
            if token is None or [each.field for each in error.violations] != ["page_token"]:
                raise
            return found, False  # the shard was forgotten
        found += page.requests
        token = page.next_page_token
        if token is None or begins_shard(token):
            return found, False
        if len(found) >= limit:
            return found, True
