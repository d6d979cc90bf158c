"""Lines that gRPC writes on standard error by itself, in a process of ours: none of a peer that sends it away."""

import socket
import subprocess
import sys
import threading

from tests.patience import patient
from tests.services import ROOT

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
REASON = b"ping_timeout"
GOAWAY = bytes([0, 0, 8 + len(REASON), 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11]) + REASON
CALL = """
import sys
import common.grpc_poller
import grpc
try:
    grpc.insecure_channel(sys.argv[1]).unary_unary("/a/b")(b"", timeout=1)
except grpc.RpcError as error:
    print(error.code().name)
"""


def test_a_peer_that_sends_us_away_is_no_line_of_grpc_among_ours() -> None:
    """Peers do so to a process that was frozen. Logs are read by programs, as one JSON object a line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()

        def send_away() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(SETTINGS + GOAWAY)
                connection.recv(1 << 16)

        sending = threading.Thread(target=send_away, daemon=True)
        sending.start()
        command = [sys.executable, "-c", CALL, f"{host}:{port}"]
        called = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(30.0), check=True)
    assert called.stdout
    assert called.stderr == ""
