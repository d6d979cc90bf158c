"""The exit code by which a process says that its configuration cannot be used, and that trying again will not help."""

EXIT_CONFIGURATION = 2
