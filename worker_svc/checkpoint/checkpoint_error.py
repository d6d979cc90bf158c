"""The error for a checkpoint that cannot be served: one line that names the file, the key and what to change."""


class CheckpointError(ValueError):
    """A checkpoint cannot be served; the message says what to do."""
