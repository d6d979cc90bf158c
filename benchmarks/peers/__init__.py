"""Quire against its peers: the same checkpoint, requests and machine, each in an environment of its own."""
