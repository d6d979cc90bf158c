"""The refusal of a checkpoint: one line that names the file, the key and what to change."""


class CheckpointError(ValueError):
    """This checkpoint cannot be served; the message says what to do."""
