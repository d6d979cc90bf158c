"""Which of its pollers gRPC uses in our services. Import it before anything of gRPC, in a service's `__main__` alone.

gRPC reads the choice once, when it is loaded; what the environment says already is left as it is. The SDK does not
import this: a user's process is not ours to settle.
"""

import os
from importlib.metadata import version

# gRPC's event engine hands every event on from thread to thread, which costs an iteration 0.3 ms of its 0.8 on two
# cores. The poller that it replaced wakes the waiting thread itself. The names are known to hold for these releases;
# gRPC complains on standard error of those that it does not know.
_MEASURED_RELEASES = ("1.80.",)
_OLD_POLLER = "-event_engine_client,-event_engine_listener,-event_engine_poller_for_python"

if version("grpcio").startswith(_MEASURED_RELEASES):
    os.environ.setdefault("GRPC_EXPERIMENTS", _OLD_POLLER)
