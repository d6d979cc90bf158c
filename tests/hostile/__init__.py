"""Clients that mean harm: raw HTTP/2 without gRPC's manners, for tests and fuzzers of any of our servers."""
