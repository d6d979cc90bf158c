"""Entry point of `python -m worker_svc.start.preflight_process OPTIONS`: a worker's checks for `quire serve`.

OPTIONS is a JSON object of final settings. The code that reads settings is not loaded: that takes longer than the
checks.
"""

import json
import sys

from common.refusal import refuse_to_start
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.option_check import CheckedOptions, OptionError
from worker_svc.start.preflight import check_start

SERVICE = "worker"


def main() -> None:
    """Ends with exit code 0, or with code 2 and one line about the error."""
    given = json.loads(sys.argv[1])
    model, generation_config = given.pop("model"), given.pop("generation_config")
    try:
        check_start(model, CheckedOptions(**given), generation_config=generation_config)
    except (CheckpointError, OptionError) as error:
        refuse_to_start(SERVICE, str(error))


if __name__ == "__main__":
    main()
