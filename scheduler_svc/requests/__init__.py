"""Requests: admission, live requests, their output for readers, recovery, pinned prefixes."""
