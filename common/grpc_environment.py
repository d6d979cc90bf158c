"""Variables by which gRPC chooses its poller, what it writes by itself and a proxy, as our services need them.

Import it before anything of gRPC, and only in a service's `__main__`.

gRPC reads the choices when it is loaded, or as it connects; a value that the environment already has is kept. The SDK
does not import this, because a user's process may use gRPC otherwise.
"""

import os
from importlib.metadata import version

# gRPC's event engine hands every event on from thread to thread, which costs an iteration 0.3 ms of its 0.8 on two
# cores. The older poller wakes the waiting thread itself. Its names are known for these releases only; gRPC
# complains on standard error of names that it does not know.
_MEASURED_RELEASES = ("1.80.",)
_OLD_POLLER = "-event_engine_client,-event_engine_listener,-event_engine_poller_for_python"

if version("grpcio").startswith(_MEASURED_RELEASES):
    os.environ.setdefault("GRPC_EXPERIMENTS", _OLD_POLLER)

# It writes of peers that went away, in lines that are no JSON, among ours, which say as much.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# It would ask the proxy that the environment names for the web, `http_proxy`, for a pod's address, or for loopback. The
# variable stays: models are downloaded through it. Empty means none.
os.environ.setdefault("grpc_proxy", "")
