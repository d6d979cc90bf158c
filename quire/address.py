"""What can be the address of a server, or of several."""

import re

from common.address import split_addresses

SCHEMES = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:")
LOOPBACK = ("127.", "localhost:", "[::1]:", "unix")

_HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


def check_address(address: str) -> str:
    """The address, if it can be one, or several with commas between.

    Raises ValueError if it is neither host:port nor a gRPC target.
    """
    if address.startswith(SCHEMES):
        return address
    for each in split_addresses(address) or [address]:
        match = _HOST_AND_PORT.fullmatch(each)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError(f"{each!r} is not an address; write host:port, such as 127.0.0.1:7847")
    return address
