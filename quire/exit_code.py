"""The exit code of a process whose configuration cannot be used, so that a restart will not help."""

EXIT_CONFIGURATION = 2
