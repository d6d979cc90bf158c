"""Says how many products of the layers are in the form that `--weight-dtype` asks for, and refuses if none is."""

import structlog

from worker_svc.gpu.quantised_products import MISFITS, QuantisedForm, num_products
from worker_svc.model.decoder import Decoder
from worker_svc.option_check import OptionError

log = structlog.get_logger()


def check_weight_form(decoder: Decoder, form: QuantisedForm) -> None:
    """Warn of products whose shape does not fit the form. Raises OptionError if that is so of all of them."""
    num_quantised, num_all = num_products(decoder)
    if num_quantised == 0:
        raise OptionError(f"--weight-dtype {form} fits no product of this model, whose {MISFITS[form]}: leave it out")
    if num_quantised < num_all:
        dtype = str(decoder.dtype).removeprefix("torch.")
        log.warning(
            f"{num_all - num_quantised} of {num_all} products of the layers stay in {dtype}: their {MISFITS[form]}"
        )
