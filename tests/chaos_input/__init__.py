"""Bad input and overload against live services: what takes too long for `make test`."""
