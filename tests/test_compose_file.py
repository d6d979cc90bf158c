"""compose.yaml and the commands of the manuals held against the services: flags, variables, ports, numbers of both."""

import json
import os
import re
import subprocess
import sys
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ruamel.yaml import YAML

from quire.scheduler_settings import SchedulerSettings
from quire.settings import INTERNAL, Settings
from quire.worker_settings import WorkerSettings
from tests.services import ROOT, free_address
from tests.test_kubernetes import settings_of

TEXT = (ROOT / "compose.yaml").read_text()
HEAD = TEXT.partition("\nname: ")[0]
MODULES = {"scheduler": "scheduler_svc", "gateway": "gateway_svc", "worker": "worker_svc", "worker-gpu": "worker_svc"}
MANUALS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "compose.yaml", "compose.tls.yaml")]
COMMAND = re.compile(r"^(?:# *)?((?:[A-Z_]+=\S+ )*)docker compose (.*)$", re.MULTILINE)
VARIABLE = re.compile(r"\$\{([A-Z_]+)")


@cache
def services() -> dict[str, Any]:
    return dict(YAML(typ="safe").load(TEXT)["services"])


def variables(service: str) -> list[str]:
    return [each.partition("=")[0] for each in services()[service].get("environment", ())]


def test_every_variable_of_the_file_is_explained_at_its_head_and_no_other() -> None:
    used = set(VARIABLE.findall(TEXT)) | {name for service in MODULES for name in variables(service)}
    assert set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b|\b(?:GPUS|MODEL|PUBLISH)\b", HEAD)) - {"ALL"} == used


@pytest.mark.parametrize("service", MODULES)
def test_a_container_gives_its_service_flags_and_variables_that_it_knows(service: str) -> None:
    found = services()[service]
    flags = [str(each).replace("${MODEL_NAME:-demo}", "demo") for each in found["command"]]
    settings = settings_of((sys.executable, "-m", MODULES[service], *flags, "--print-config"), ())
    port = int(settings["listen"].rpartition(":")[2])
    assert [int(each.rpartition(":")[2]) for each in found.get("ports", ())] in ([], [port])
    assert f"127.0.0.1:{port}" in dockerfile_stage(service)
    kinds: dict[str, type[Settings]] = {
        "scheduler": SchedulerSettings,
        "worker": WorkerSettings,
        "worker-gpu": WorkerSettings,
    }
    for name in variables(service):
        if name == "QUIRE_API_KEY":
            continue
        kind = kinds[service]
        assert name.removeprefix(kind.prefix()).lower() in kind.model_fields.keys() - INTERNAL


def dockerfile_stage(service: str) -> str:
    """The stage of a service, and those that it is made from."""
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    target = services()[service]["build"]["target"]
    (stage,) = (each for each in stages if each.partition("\n")[0].endswith(f" AS {target}"))
    base = stage.split()[0]
    return stage if base == "base" else stage + next(each for each in stages if each.startswith(f"base AS {base}"))


class Answering(BaseHTTPRequestHandler):
    """The gateway's answer to whoever asks for its health."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def test_a_gateway_is_healthy_though_its_container_is_given_a_proxy() -> None:
    """Docker gives every container the proxies of its settings. Regression: the check asked the proxy for loopback."""
    check = json.loads(dockerfile_stage("gateway").partition("HEALTHCHECK ")[2].partition(" CMD ")[2].splitlines()[0])
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arguments = [each.replace("127.0.0.1:8000/", f"127.0.0.1:{server.server_port}/") for each in check[1:]]
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), f"http://{free_address()}")
        environment = {key: value for key, value in os.environ.items() if key.lower() != "no_proxy"}
        checked = subprocess.run([sys.executable, *arguments], env=environment | proxies, capture_output=True)
        wrong = [each.replace("/health", "/other") for each in arguments]
        refused = subprocess.run([sys.executable, *wrong], env=environment | proxies, capture_output=True)
        server.shutdown()
    assert check[0] == "python" and arguments != check[1:]
    assert checked.returncode == 0, checked.stderr.decode()
    assert refused.returncode != 0


def test_what_ends_has_longer_than_it_drains() -> None:
    for service, module in (("scheduler", SchedulerSettings), ("worker", WorkerSettings)):
        grace_s = int(services()[service]["stop_grace_period"].removesuffix("s"))
        assert grace_s > module.model_fields["drain_timeout_s"].default + 5


@pytest.mark.parametrize("path", [*MANUALS, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: str(path.name))
def test_commands_of_the_manuals_scale_what_has_a_port_for_each(path: Any) -> None:
    for given, command in COMMAND.findall(path.read_text()):
        for service, variable in (("scheduler", "PUBLISH"), ("gateway", "PUBLISH_HTTP")):
            number = int((re.findall(rf"--scale {service}=(\d+)", command) or ["1"])[0])
            ports = (re.findall(rf"(?<!\S){variable}=\S+:(\d+)-(\d+)", given) or [("1", "1")])[0]
            assert int(ports[1]) - int(ports[0]) + 1 >= number, f"{command}: each needs a port: {variable}"
