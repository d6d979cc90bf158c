"""The images that others publish: pulled, or made from the packages of this machine's distribution.

A stand-in has a name of its own and stays in the engine's store, so nothing is shadowed and the next run is quick.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.compose.engine import Engine, SmokeError, say

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImage:
    """A published image, and how to make a stand-in for it."""

    variable: str  # of compose.yaml, that names the image
    reference: str
    stand_in: str
    packages: tuple[str, ...]
    owner: str = "root"  # of the data folder, and user that it runs as
    changes: tuple[str, ...] = ()  # instructions of a Dockerfile


@dataclass(frozen=True, slots=True)
class Archive:
    """Archive of this machine's packages."""

    suite: str
    mirror: str
    components: str


# The same Python as here, so that wheels gathered here fit.
PYTHON_IMAGE = BaseImage(
    variable="PYTHON_IMAGE",
    reference=f"docker.io/library/python:{PYTHON}-slim",
    stand_in=f"localhost/quire-stand-in/python:{PYTHON}",
    packages=("ca-certificates", "python3", "python3-venv"),
)
BUILDER_IMAGE = BaseImage(
    variable="BUILDER_IMAGE",
    reference=f"docker.io/library/python:{PYTHON}",
    stand_in=f"localhost/quire-stand-in/python-builder:{PYTHON}",
    packages=(*PYTHON_IMAGE.packages, "g++"),
)
REDIS_IMAGE = BaseImage(
    variable="REDIS_IMAGE",
    reference="docker.io/library/redis:8-alpine",
    stand_in="localhost/quire-stand-in/redis:latest",
    packages=("redis-server",),
    owner="redis",
    changes=("USER redis", "WORKDIR /data", "VOLUME /data"),
)


def provide(engine: Engine, image: BaseImage) -> str:
    """Name of an image in the engine's store. Raises SmokeError if it can be neither pulled nor made."""
    chosen = os.environ.get(image.variable)
    if chosen:
        return chosen
    for name in (image.reference, image.stand_in):
        if _is_here(engine, name):
            return name
    if engine.run("pull", image.reference).returncode == 0:
        return image.reference
    _make_stand_in(engine, image)
    return image.stand_in


def check_python(engine: Engine, image: str) -> None:
    """Wheels gathered here must fit. Raises SmokeError if the image has another Python."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    found = engine.ask("run", "--rm", "--network=none", "--entrypoint=python3", image, "-c", code)
    if found != PYTHON:
        raise SmokeError(f"{image} has Python {found}, and this is {PYTHON}: make compose-smoke PYTHON=python{found}")


def _is_here(engine: Engine, name: str) -> bool:
    return engine.run("image", "inspect", name).returncode == 0


def _make_stand_in(engine: Engine, image: BaseImage) -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise SmokeError(
            f"{image.reference} cannot be pulled, and only root with debootstrap can make a stand-in: "
            f"set {image.variable} to an image that is here, or install debootstrap and run as root"
        )
    archive = find_archive()
    say(f"{image.reference} cannot be pulled: making {image.stand_in} from packages of {archive.suite}")
    with tempfile.TemporaryDirectory(prefix="quire-stand-in-") as folder:
        rootfs = Path(folder) / "rootfs"
        _bootstrap(rootfs, image, archive)
        _import(engine, rootfs, image)


def find_archive() -> Archive:
    """Find the archive in apt's own configuration. Raises SmokeError on other systems than Debian's family."""
    release = platform.freedesktop_os_release()
    suite = release.get("VERSION_CODENAME", "")
    if not suite or shutil.which("apt-get") is None:
        raise SmokeError("stand-ins for images are made of Debian packages: this machine has no apt")
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI) $(COMPONENT)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split() for line in targets.stdout.splitlines()]
    ours = [(mirror, component) for name, mirror, component in rows if name == suite]
    if not ours:
        raise SmokeError(f"apt knows no packages of {suite}: run `apt-get update`")
    mirror = ours[0][0]
    components = dict.fromkeys(component for each, component in ours if each == mirror)
    return Archive(suite, mirror, ",".join(components))


def _bootstrap(rootfs: Path, image: BaseImage, archive: Archive) -> None:
    command = [
        "debootstrap",
        "--variant=minbase",
        f"--include={','.join(image.packages)}",
        f"--components={archive.components}",
        archive.suite,
        str(rootfs),
        archive.mirror,
    ]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise SmokeError(f"debootstrap exits with {result.returncode}:\n{result.stdout[-2000:]}")
    subprocess.run(["chroot", str(rootfs), "install", "-d", "-o", image.owner, "/data"], check=True)


def _import(engine: Engine, rootfs: Path, image: BaseImage) -> None:
    left_out = [f"--exclude=./{path}" for path in ("var/cache/apt/*", "var/lib/apt/lists/*", "var/log/*", "dev/*")]
    changes = [f"--change={change}" for change in image.changes]
    with subprocess.Popen(["tar", "-C", str(rootfs), *left_out, "-c", "."], stdout=subprocess.PIPE) as tar:
        command = [*engine.command, "import", *changes, "-", image.stand_in]
        result = subprocess.run(
            command, stdin=tar.stdout, capture_output=True, text=True, env={**os.environ, **engine.env}
        )
    if result.returncode != 0 or tar.returncode != 0:
        raise SmokeError(f"{image.stand_in} cannot be imported:\n{result.stderr[-2000:]}")
