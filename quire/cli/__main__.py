"""Entry point of the console script `quire`: works without the extra `cli` as far as saying that it is missing."""

import sys

from quire.cli.install import install_hint

EXTRA = ("typer", "rich", "pydantic", "pydantic_settings", "structlog")


def main() -> None:
    """Runs the command line."""
    try:
        from quire.cli.app import run  # noqa: PLC0415 - the extra may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        sys.stderr.write(f"quire: the command line needs {error.name}; run {install_hint('cli')}\n")
        raise SystemExit(1) from None
    run()


if __name__ == "__main__":
    main()
