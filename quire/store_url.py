"""URL of a cluster of Redis or Valkey: the addresses to begin with, and the URL of each node. Pure."""

from typing import NamedTuple
from urllib.parse import urlsplit

CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}  # to that of one node
_PORT = 6379


class NodeAddress(NamedTuple):
    """Address of one node of a cluster."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ClusterUrl(NamedTuple):
    """Parts of redis+cluster://[user:password@]host[:port][,host[:port]…][/][?options], or rediss+cluster://…"""

    scheme: str  # of one node
    user_info: str
    seeds: tuple[NodeAddress, ...]
    options: str

    @classmethod
    def parse(cls, url: str) -> "ClusterUrl":
        """Parse a URL with one of the CLUSTER_SCHEMES. Raises ValueError, without any part of it in the message."""
        scheme, _, rest = url.partition("://")
        rest, _, options = rest.partition("?")
        place, _, database = rest.partition("/")
        user_info, _, hosts = place.rpartition("@")
        if database not in ("", "0"):
            raise ValueError("a cluster has no database numbers; --deployment keeps several systems apart")
        return cls(CLUSTER_SCHEMES[scheme], user_info, tuple(_address(host) for host in hosts.split(",")), options)

    def of(self, node: NodeAddress) -> str:
        """URL of one node, with the same credentials and options."""
        user_info = f"{self.user_info}@" if self.user_info else ""
        return f"{self.scheme}://{user_info}{node}" + (f"?{self.options}" if self.options else "")


def is_cluster(url: str) -> bool:
    """True if the URL is that of a cluster."""
    return url.partition("://")[0] in CLUSTER_SCHEMES


def _address(text: str) -> NodeAddress:
    try:
        parts = urlsplit(f"//{text.strip()}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ValueError("each address of a cluster is host or host:port, with commas between them")
    return NodeAddress(host, port or _PORT)
