"""URLs of clusters: every address is found, each node gets the same credentials, nothing secret is in a refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import parse_url

from quire.store_url import ClusterUrl, NodeAddress, is_cluster

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z0-9]{1,5})?", fullmatch=True)
addresses = st.builds(NodeAddress, names, st.integers(1, 65535))
secrets = st.from_regex(r"[A-Za-z0-9_~!$&'()*+=-]{1,12}", fullmatch=True)


@given(st.lists(addresses, min_size=1, max_size=6), st.none() | secrets, st.sampled_from(["", "/", "/0"]))
def test_every_address_is_found_and_every_node_gets_the_same_credentials(
    nodes: list[NodeAddress], secret: str | None, path: str
) -> None:
    user = "" if secret is None else f"me:{secret}@"
    url = ClusterUrl.parse(f"rediss+cluster://{user}{','.join(map(str, nodes))}{path}?ssl_ca_certs=/ca.pem")
    assert url.seeds == tuple(nodes)
    for node in nodes:
        options = dict(parse_url(url.of(node)))
        assert (options.get("host"), options.get("port")) == (node.host, node.port)
        assert options.get("password") == secret and options["ssl_ca_certs"] == "/ca.pem"


def test_a_port_left_out_is_that_of_redis_and_an_ipv6_address_keeps_its_brackets() -> None:
    url = ClusterUrl.parse("redis+cluster://[::1]:7000,[fe80::2],h")
    assert url.seeds == (NodeAddress("::1", 7000), NodeAddress("fe80::2", 6379), NodeAddress("h", 6379))
    assert url.of(url.seeds[0]) == "redis://[::1]:7000"


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "unix:///s", "memory", "", "cluster://h"])
def test_only_the_schemes_of_clusters_are_clusters(url: str) -> None:
    assert not is_cluster(url)
    assert is_cluster("redis+cluster://h") and is_cluster("rediss+cluster://h")


@pytest.mark.parametrize("rest", ["", ",", "h,", "h:1,,g:2", "h:70000", "u:se/cret@h", "u:secret@h:port", "h/1", "h/x"])
def test_a_malformed_url_is_refused_without_its_secrets(rest: str) -> None:
    with pytest.raises(ValueError, match="cluster") as refused:
        ClusterUrl.parse(f"redis+cluster://{rest}")
    assert "cret" not in str(refused.value)
