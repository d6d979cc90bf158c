"""Bad input and overload against live services, too slow for `make test`."""
