"""Manifests of deploy/kubernetes held against the services: flags, variables, ports, probes, names, time to end."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from quire.scheduler_settings import SchedulerSettings
from tests.peer_certificates import PeerCertificates
from tests.services import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "tensor-parallel")
TLS_NAMES = {"quire-scheduler", "quire-worker"}
POD_IP = "10.0.0.7"
API_KEY = "a-key-of-this-test"
NAME = "app.kubernetes.io/name"
Object = dict[str, Any]


@cache
def documents(path: Path) -> list[Object]:
    return [dict(each) for each in YAML(typ="safe").load_all(path)]


def kustomization(folder: Path) -> Object:
    (found,) = documents(folder / "kustomization.yaml")
    return found


def resources(folder: Path) -> list[Object]:
    """Objects of a kustomization and of those that it builds on, without its patches."""
    found: list[Object] = []
    for name in kustomization(folder)["resources"]:
        path = (folder / name).resolve()
        found += resources(path) if path.is_dir() else documents(path)
    return found


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    return [each for each in resources(FOLDER / overlay) if each["kind"] in kinds]


@dataclass(frozen=True)
class Pod:
    """Template of one workload's pods."""

    owner: str
    labels: Mapping[str, str]
    spec: Object

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def ports(self) -> dict[str, int]:
        return {each["name"]: each["containerPort"] for each in self.container["ports"]}

    @property
    def is_ours(self) -> bool:
        return str(self.container["image"]).startswith("quire-")

    def variables(self, rank: str = "0") -> dict[str, str]:
        """Variables of the container, as Kubernetes sets them; of a set's pod with this number."""
        literals = dict(each.split("=", 1) for each in config_map()["literals"])
        of_field = {"status.podIP": POD_IP, "metadata.labels['apps.kubernetes.io/pod-index']": rank}
        found = {}
        for each in self.container["env"]:
            source = each.get("valueFrom", {})
            if "value" in each:
                found[each["name"]] = each["value"]
            elif "fieldRef" in source:
                found[each["name"]] = of_field[source["fieldRef"]["fieldPath"]]
            elif "configMapKeyRef" in source:
                assert source["configMapKeyRef"]["name"] == config_map()["name"]
                found[each["name"]] = literals[source["configMapKeyRef"]["key"]]
            else:
                assert source["secretKeyRef"] == {"name": "quire-api-keys", "key": "keys"}
                found[each["name"]] = API_KEY
        return found

    def settings(self, rank: str = "0") -> Object:
        """Settings in force in this container, as the service itself reads them. A wrong name ends it."""
        module = f"{self.container['name']}_svc"
        command = [sys.executable, "-m", module, *self.container["args"], "--print-config"]
        if "command" in self.container:
            shell, flag = self.container["command"]
            command = [shell, flag, self.container["args"][0].rstrip() + " --print-config"]
        return settings_of(tuple(command), tuple(self.variables(rank).items()))


@cache
def settings_of(command: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> Object:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), **dict(variables)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    (table,) = tomllib.loads(done.stdout).values()
    return dict(table)


def config_map() -> Object:
    (generated,) = kustomization(FOLDER / "base")["configMapGenerator"]
    return dict(generated)


def pods(overlay: str) -> list[Pod]:
    return [
        Pod(each["metadata"]["name"], each["spec"]["template"]["metadata"]["labels"], each["spec"]["template"]["spec"])
        for each in of_kind(overlay, "Deployment", "StatefulSet")
    ]


def pod_of(overlay: str, owner: str) -> Pod:
    (found,) = (each for each in pods(overlay) if each.owner == owner)
    return found


WORKLOADS = [(overlay, pod.owner) for overlay in OVERLAYS for pod in pods(overlay)]
OURS = [(overlay, owner) for overlay, owner in WORKLOADS if pod_of(overlay, owner).is_ours]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def selected(overlay: str, labels: Mapping[str, str]) -> list[Pod]:
    return [pod for pod in pods(overlay) if labels.items() <= pod.labels.items()]


def probes(pod: Pod) -> Iterator[tuple[str, Object]]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if name in pod.container:
            yield name, pod.container[name]


def test_every_file_is_used_by_a_kustomization() -> None:
    used = {FOLDER / overlay / "kustomization.yaml" for overlay in (*OVERLAYS, "base", "tls")}
    for path in list(used):
        made_of = kustomization(path.parent)
        named = [*made_of["resources"], *(each["path"] for each in made_of.get("patches", ()))]
        used |= {path.parent / name for name in named if name.endswith(".yaml")}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} == used


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_are_unique_and_selectors_find_the_pods_of_their_own(overlay: str) -> None:
    objects = resources(FOLDER / overlay)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    for each in of_kind(overlay, "Deployment", "StatefulSet", "PodDisruptionBudget"):
        found = selected(overlay, each["spec"]["selector"]["matchLabels"])
        assert [pod.owner for pod in found] == [each["metadata"]["name"]]
    for each in of_kind(overlay, "Service"):
        (pod,) = selected(overlay, each["spec"]["selector"])
        assert all(port["targetPort"] in pod.ports for port in each["spec"]["ports"])
    for each in of_kind(overlay, "StatefulSet"):
        assert each["spec"]["serviceName"] in {service["metadata"]["name"] for service in of_kind(overlay, "Service")}
    for each in of_kind(overlay, "NetworkPolicy"):
        (pod,) = selected(overlay, each["spec"]["podSelector"]["matchLabels"])
        for rule in each["spec"]["ingress"]:
            assert all(selected(overlay, peer["podSelector"]["matchLabels"]) for peer in rule.get("from", ()))


@pytest.mark.parametrize(("overlay", "owner"), OURS)
def test_a_service_accepts_its_flags_and_variables_and_listens_where_others_look(overlay: str, owner: str) -> None:
    pod = pod_of(overlay, owner)
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(overlay, "Service")}
    settings = pod.settings()
    listened = {port_of(settings[key]) for key in ("listen", "metrics_listen", "group_address") if key in settings}
    assert listened == set(pod.ports.values())
    assert settings["listen"].startswith("0.0.0.0:")
    for key in ("store", "scheduler"):
        if key in settings:
            host, _, port = settings[key].removeprefix("redis://").rpartition(":")
            assert int(port) in {each["port"] for each in services[host]["ports"]}
    if "gateway" not in owner:
        assert settings["advertise"] == POD_IP  # pods cannot look up each other's names
    annotations = [
        each["spec"]["template"]["metadata"].get("annotations", {})
        for each in of_kind(overlay, "Deployment", "StatefulSet")
        if each["metadata"]["name"] == owner
    ]
    assert annotations == [
        {"prometheus.io/scrape": "true", "prometheus.io/port": str(port_of(settings["metrics_listen"]))}
        if "metrics_listen" in settings
        else {}
    ]


@pytest.mark.parametrize(("overlay", "owner"), OURS)
def test_probes_ask_for_what_the_service_answers(overlay: str, owner: str) -> None:
    pod = pod_of(overlay, owner)
    found = dict(probes(pod))
    assert "readinessProbe" in found
    served = {"quire-scheduler": "", "quire-worker": "quire.v1.Worker"}
    for name, probe in found.items():
        # Ready is who has been taken by a leader, so that a rollout stops at a worker that is refused.
        registered = ".Registered" if name == "readinessProbe" and owner == "quire-worker" else ""
        if "grpc" in probe:
            assert probe["grpc"]["port"] == pod.ports["grpc"]
            assert probe["grpc"].get("service", "") == served[owner] + registered
        elif "httpGet" in probe:
            assert probe["httpGet"]["port"] in pod.ports
            assert probe["httpGet"]["path"] in {"/health", "/ready"}
        else:
            assert probe["exec"]["command"][-1].endswith(
                f"127.0.0.1:{pod.ports['grpc']} --service quire.v1.Worker.Registered"
            )


@pytest.mark.parametrize(("overlay", "owner"), OURS)
def test_a_pod_has_longer_to_end_than_its_service_takes(overlay: str, owner: str) -> None:
    pod = pod_of(overlay, owner)
    pause_s = sum(int(each["exec"]["command"][1]) for each in pod.container.get("lifecycle", {}).values())
    drain_s = pod.settings()["drain_timeout_s"]
    assert pod.spec["terminationGracePeriodSeconds"] > drain_s + pause_s + 5  # steps and streams in flight


@pytest.mark.parametrize(("overlay", "owner"), WORKLOADS)
def test_a_pod_has_no_rights_that_it_does_not_need(overlay: str, owner: str) -> None:
    pod = pod_of(overlay, owner)
    assert pod.spec["automountServiceAccountToken"] is False
    assert pod.spec["securityContext"]["runAsNonRoot"] is True and pod.spec["securityContext"]["runAsUser"] > 0
    assert pod.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod.spec["enableServiceLinks"] is False  # else a variable QUIRE_STORE_PORT ends our services
    volumes = {each["name"] for each in pod.spec.get("volumes", ())}
    mounted = {each["name"]: each["mountPath"] for each in pod.container["volumeMounts"]}
    if pod.is_ours:
        assert pod.spec["securityContext"]["runAsUser"] == 10001 and pod.spec["shareProcessNamespace"] is True
        assert volumes == set(mounted) and mounted["tmp"] == "/tmp"
    assert "memory" in pod.container["resources"]["limits"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_made_by_our_dockerfile(overlay: str) -> None:
    targets = {line.split()[-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("FROM ")}
    renamed = {each["name"]: each["newName"] for each in kustomization(FOLDER / overlay).get("images", ())}
    images = [str(pod.container["image"]).partition(":")[0] for pod in pods(overlay) if pod.is_ours]
    assert set(renamed) <= set(images)
    assert {renamed.get(image, image).removeprefix("quire-") for image in images} <= targets


def test_the_patch_for_gpus_names_a_container_and_a_cache_that_the_image_uses() -> None:
    patched = kustomization(FOLDER / "gpu")["patches"]
    (patch,) = (each for item in patched for each in documents(FOLDER / "gpu" / item["path"]))
    pod = Pod("patch", {}, patch["spec"]["template"]["spec"])
    base = pod_of("gpu", patch["metadata"]["name"])
    assert pod.container["name"] == base.container["name"]
    assert pod.container["resources"]["limits"]["nvidia.com/gpu"] == 1
    paths = {each["name"]: each["mountPath"] for each in pod.container["volumeMounts"]}
    assert f"TRITON_CACHE_DIR={paths['kernels']} " in (ROOT / "Dockerfile").read_text()
    memory = {each["name"]: each["emptyDir"].get("medium") for each in patch["spec"]["template"]["spec"]["volumes"]}
    assert (paths["shm"], memory) == ("/dev/shm", {"kernels": None, "shm": "Memory"})


def test_an_update_of_workers_on_gpus_needs_no_gpu_beside_those_in_use() -> None:
    (patch,) = documents(FOLDER / "gpu" / "worker.yaml")
    assert patch["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    (base,) = (each for each in of_kind("gpu", "Deployment") if each["metadata"]["name"] == patch["metadata"]["name"])
    assert base["spec"]["replicas"] > 1  # the others serve meanwhile


def test_the_store_writes_every_entry_to_its_volume_before_it_answers() -> None:
    store = pod_of("cpu", "quire-store")
    command = store.container["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes" and options["--appendfsync"] == "always"
    assert options["--maxmemory-policy"] == "noeviction"
    (mount,) = store.container["volumeMounts"]
    assert options["--dir"] == mount["mountPath"]
    limit, most = store.container["resources"]["limits"]["memory"], options["--maxmemory"]
    assert limit.endswith("Gi") and most.endswith("gb")  # both of 2 ** 30 bytes
    records = SchedulerSettings.model_fields["max_record_mb"].default / 1024
    assert records < int(most.removesuffix("gb")) <= int(limit.removesuffix("Gi")) / 2


def test_ranks_in_pods_of_their_own_find_rank_0() -> None:
    (group,) = of_kind("tensor-parallel", "StatefulSet")[1:]
    pod = pod_of("tensor-parallel", group["metadata"]["name"])
    others = [pod.settings(str(rank)) for rank in range(group["spec"]["replicas"])]
    assert [each["rank"] for each in others] == list(range(others[0]["tensor_parallel"]))
    (service,) = (each for each in of_kind("tensor-parallel", "Service") if each["metadata"]["name"] == pod.owner)
    assert service["spec"]["publishNotReadyAddresses"] is True  # rank 0 is ready when all have joined
    port = pod.ports["group"]
    assert others[0]["group_address"] == f"0.0.0.0:{port}"
    assert {each["group_address"] for each in others[1:]} == {f"{pod.owner}-0.{pod.owner}:{port}"}


@pytest.mark.parametrize("owner", ["quire-scheduler", "quire-gateway", "quire-worker"])
def test_patches_for_tls_give_each_service_its_files_and_its_probes_a_certificate(owner: str, tmp_path: Path) -> None:
    folder = FOLDER / "tls"
    patches = [each for item in kustomization(folder)["patches"] for each in documents(folder / item["path"])]
    (patch,) = (each for each in patches if each["metadata"]["name"] == owner)
    base, patched = pod_of("cpu", owner), Pod(owner, {}, patch["spec"]["template"]["spec"])
    assert patched.container["name"] == base.container["name"]
    (mount,), (volume,) = patched.container["volumeMounts"], patched.spec["volumes"]
    assert volume["secret"]["secretName"] == "quire-tls" and mount["name"] == volume["name"] and mount["readOnly"]
    given = {each["name"]: each["value"] for each in patched.container["env"]}
    assert given["QUIRE_TLS_ROOT"] == f"{mount['mountPath']}/ca.crt" and given["QUIRE_TLS_SERVER_NAME"] in TLS_NAMES
    files = secret_files(tmp_path)
    here = {name: value.replace(mount["mountPath"], str(files)) for name, value in given.items()}
    module = f"{base.container['name']}_svc"
    command = (sys.executable, "-m", module, *base.container["args"], "--print-config")
    settings = settings_of(command, tuple({**base.variables(), **here}.items()))
    if owner != "quire-gateway":
        assert settings["peer_tls_cert"] == str(files / "tls.crt") and settings["peer_tls_server_name"] in TLS_NAMES
        assert patched.spec["securityContext"]["fsGroup"] == 10001 and volume["secret"]["defaultMode"] == 0o440
        for name, probe in probes(patched):
            assert probe["grpc"] is None and name in base.container
            if name == "livenessProbe":  # a probe with files of a new authority would end servers with those before
                assert probe["tcpSocket"]["port"] == base.ports["grpc"] and "exec" not in probe
            else:
                assert f"127.0.0.1:{base.ports['grpc']}" in probe["exec"]["command"]
                if owner == "quire-worker":
                    assert probe["exec"]["command"][-1] == base.container[name]["grpc"]["service"]
    if owner == "quire-worker":
        assert {"QUIRE_TLS_CLIENT_CERT", "QUIRE_TLS_CLIENT_KEY"} <= set(given)


def secret_files(folder: Path) -> Path:
    """The files of the secret, of an authority of this test."""
    made = PeerCertificates(folder / "tls", *sorted(TLS_NAMES))
    for file, name in ((made.cert, "tls.crt"), (made.key, "tls.key"), (made.root, "ca.crt")):
        file.rename(made.cert.parent / name)
    return made.cert.parent
