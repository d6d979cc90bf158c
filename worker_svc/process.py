"""The worker's process after settings and model folder are checked: loads torch and the model, and serves."""

import sys
from collections.abc import Mapping

import common.grpc_environment  # noqa: F401 - before gRPC is loaded
import worker_svc.torch_environment  # noqa: F401 - before torch is loaded
from common.access import AccessError
from common.log import set_up_service_logging
from common.peer_tls import peer_tls_of
from common.process import run_service
from common.refusal import refuse_to_start
from common.status import Status
from quire.credentials import Credentials
from quire.listening import ListenError
from quire.time_slice import shorten_slice
from quire.worker_settings import WorkerSettings
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.option_check import OptionError
from worker_svc.service.lifecycle import ServiceOptions, serve
from worker_svc.start.loading import load_model

SERVICE = "worker"
# Longest time that the execution thread holds the interpreter's lock while the event loop waits for it. The default of
# 5 ms would now and then be added to an answer.
_SWITCH_INTERVAL_S = 0.0005


def run(settings: WorkerSettings, status: Status, names: Mapping[str, str]) -> None:
    """Serves until told to end, and reports the progress of the start; `names`: names of the settings in errors."""
    set_up_service_logging(SERVICE, settings, status, names)
    try:
        credentials, peer_tls = Credentials(), peer_tls_of(settings)
    except (AccessError, ValueError) as error:
        refuse_to_start(SERVICE, str(error), names)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    shorten_slice()
    options = ServiceOptions(
        listen=settings.listen,
        advertise=settings.advertise,
        scheduler=settings.scheduler,
        worker_id=settings.worker_id,
        parent_pipe_fd=settings.parent_pipe_fd,
        drain_timeout_s=settings.drain_timeout_s,
        metrics_listen=settings.metrics_listen,
        credentials=credentials,
        peer_tls=peer_tls,
    )
    try:
        run_service(serve(options, lambda: load_model(settings, status)))
    except (CheckpointError, OptionError, ListenError) as error:
        refuse_to_start(SERVICE, str(error), names)
