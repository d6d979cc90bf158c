"""Large tokenizers block the scheduler while they are read: the lease holds that long, and no standby leads."""

import json
import threading
from pathlib import Path

import pytest

from scheduler_svc.journal.keys import Keys
from tests.scheduler.text_tokenizers import byte_level_json
from tests.services import start_scheduler, start_worker
from tests.valkey import ValkeyProcess
from tests.worker.tiny_models import write_tiny_model

LEASE_MS = 1000
NUM_TOKENS = 120_000


def large_json() -> bytes:
    """Make a tokenizer with many unused words, like a vocabulary for many languages."""
    document = json.loads(byte_level_json())
    vocabulary = document["model"]["vocab"]
    vocabulary.update({f"word number {i:_}": len(vocabulary) + i for i in range(NUM_TOKENS)})
    return json.dumps(document).encode()


@pytest.mark.long
def test_the_lease_is_held_for_longer_while_a_large_tokenizer_is_read(tmp_path: Path, valkey: ValkeyProcess) -> None:
    folder = write_tiny_model("llama_gqa", tmp_path / "model")
    (folder / "tokenizer.json").write_bytes(large_json())
    key, left_ms, is_ready = Keys.of("default").lease, [], threading.Event()

    def look() -> None:
        while not is_ready.is_set():
            left_ms.append(int(valkey.command("PTTL", key)[1:]))  # ":1000"

    looking = threading.Thread(target=look)
    scheduler, address = start_scheduler("--store", valkey.url, "--lease-ms", str(LEASE_MS))
    with scheduler:
        looking.start()
        try:
            with start_worker(address, "--threads", "1", "--num-blocks", "50", model=folder):
                scheduler.wait_for("worker ready")
        finally:
            is_ready.set()
            looking.join()
    assert max(left_ms) > LEASE_MS
