"""The gateway: HTTP APIs in front of the scheduler. A user of the SDK, which knows no request but those it carries."""
