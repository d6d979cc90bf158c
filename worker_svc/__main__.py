"""Entry point of the worker: reads and checks the settings, checks the model folder, then loads torch."""

import common.missing_extra  # noqa: F401 - before what an extra brings

# isort: split
import sys

from common.process import end_after
from common.refusal import refuse_to_start
from common.settings import settings_or_exit
from common.status import Status
from quire.settings import names_given, to_toml
from quire.worker_settings import WorkerSettings
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.option_check import CheckedOptions, OptionError
from worker_svc.start.preflight import check_start

SERVICE = "worker"


def main() -> None:
    """Entry point of `python -m worker_svc`."""
    settings = settings_or_exit(SERVICE, WorkerSettings, sys.argv[1:])
    if settings.print_config:
        sys.stdout.write(to_toml(settings) + "\n")
        return
    names = names_given(WorkerSettings, sys.argv[1:])
    status = Status(settings.status_fd)
    status.phase("checking")
    try:
        warnings = check_start(
            settings.model, CheckedOptions.of(settings), generation_config=settings.generation_config
        )
    except (CheckpointError, OptionError) as error:
        refuse_to_start(SERVICE, str(error), names)
    if settings.check:
        sys.stderr.writelines(f"{SERVICE}: warning: {' '.join(each.split())}\n" for each in warnings)
        return
    status.phase("starting")
    # Imported here because it loads torch, which takes seconds: wrong settings are refused before that.
    if settings.rank:
        from worker_svc import rank  # noqa: PLC0415

        rank.join_and_follow(settings, status, names)
    from worker_svc import process  # noqa: PLC0415

    process.run(settings, status, names)


if __name__ == "__main__":
    end_after(main)
