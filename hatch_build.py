"""Builds the native kernels into a wheel, in a variant for each usual kind of processor: `kernels/native/variants.py`.

Whoever installs the wheel needs no compiler. An editable install brings none: there they are compiled at first use.
QUIRE_BUILD_KERNELS says what to do: `auto` (default) makes a wheel without them, and a warning, where they cannot be
compiled; `required` fails there; `off` leaves them out. CXX names another compiler than g++. QUIRE_BUILT_KERNELS names
a folder in which `kernels.native.prebuilding` has compiled them already.
"""

import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_WISHES = ("auto", "required", "off")


class NativeKernelsHook(BuildHookInterface[Any]):
    """Called by hatchling before and after a wheel is written."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and names what to put into the wheel and where."""
        self._folder: str | None = None
        wish = os.environ.get("QUIRE_BUILD_KERNELS", "auto").lower()
        if wish not in _WISHES:
            raise ValueError(f"QUIRE_BUILD_KERNELS is {wish!r}: give one of {', '.join(_WISHES)}")
        sources = Path(self.root) / "kernels" / "native" / "src"
        if wish == "off" or version == "editable" or not sources.is_dir():
            return
        sys.path.insert(0, self.root)
        try:
            built = self._compile()
        except (RuntimeError, OSError) as error:
            if wish == "required":
                raise
            self.app.display_warning(
                f"the wheel has no native kernels: {error}. Where it is installed they are compiled at first use, or "
                "torch computes, which is slower"
            )
            return
        finally:
            sys.path.remove(self.root)
        build_data["force_include"].update({str(path): f"kernels/native/prebuilt/{path.name}" for path in built})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was compiled, which is in the wheel by now."""
        self._remove_compiled()

    def _remove_compiled(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _compile(self) -> list[Path]:
        from kernels.native.prebuilding import compile_variants  # noqa: PLC0415 - found by then
        from kernels.native.variants import variants_for  # noqa: PLC0415

        folder = os.environ.get("QUIRE_BUILT_KERNELS")
        if folder is None:
            folder = self._folder = tempfile.mkdtemp(prefix="quire-kernels-")
            try:
                compile_variants(Path(folder), self.app.display_info)
            except BaseException:  # `finalize` is not called for a wheel that is not written
                self._remove_compiled()
                raise
        return [Path(folder) / each.file_name for each in variants_for(platform.machine())]


def _platform_tag() -> str:
    """Platform tag of this machine: auditwheel is to look over a wheel that others install."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
