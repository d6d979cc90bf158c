"""Commands that a user of the store needs, as docs/operations.md lists them: all that schedulers send, and enough."""

import re
import signal

import pytest

from tests.services import ROOT, free_address, start_scheduler
from tests.valkey import ValkeyProcess

CODE = ROOT / "scheduler_svc" / "journal"
SENT = (r'pack\("([A-Z]+)"(?:, "([A-Z]+)")?', r"redis\.call\('([A-Z]+)'(?:, '([A-Z]+)')?", r'"(XADD|XREAD|EVAL)"()')
WITH_SUBCOMMANDS = {"config", "cluster", "xinfo"}
OF_A_CLUSTER = {"+cluster|slots", "+cluster|myid", "+asking"}  # docs/shards.md
OF_A_CONNECTION = {"+hello", "+auth", "+ping", "+select", "+client|setinfo"}  # redis-py's own
RULES = re.compile(r"`~\{quire:\*` and `([^`]+)`")


def listed() -> list[str]:
    found = RULES.search((ROOT / "docs" / "operations.md").read_text())
    assert found is not None
    return found[1].split()


def test_every_command_that_is_sent_is_listed_and_no_other() -> None:
    text = "\n".join(path.read_text() for path in sorted(CODE.glob("*.py")))
    sent = set()
    for pattern in SENT:
        for name, below in re.findall(pattern, text):
            sent.add(f"+{name}|{below}".lower() if name.lower() in WITH_SUBCOMMANDS else f"+{name}".lower())
    assert len(sent) > 20
    assert set(listed()) == (sent - OF_A_CLUSTER) | OF_A_CONNECTION
    assert all(each in (ROOT / "docs" / "shards.md").read_text() for each in OF_A_CLUSTER)


@pytest.mark.parametrize("left_out", [None, "+xadd"])
def test_schedulers_lead_and_hand_over_as_a_user_with_these_commands_alone(left_out: str | None) -> None:
    port = int(free_address().rpartition(":")[2])
    with ValkeyProcess(port=port) as store:
        rules = [each for each in listed() if each != left_out]
        assert store.command("ACL", "SETUSER", "quire", "on", ">secret", "~{quire:*", *rules).startswith(b"+OK")
        url = f"redis://quire:secret@127.0.0.1:{port}"
        if left_out is not None:
            with pytest.raises(AssertionError):
                start_scheduler("--store", url, "--store-timeout-s", "1")
            return
        first, _ = start_scheduler("--store", url, "--standby")
        with first:
            first.wait_for("leading")
            second, _ = start_scheduler("--store", url, "--standby")
            with second:
                second.wait_for("leader seen")
                first.signal(signal.SIGTERM)
                second.wait_for("leading")
        assert store.command("ACL", "LOG") == b"*0\r\n"
