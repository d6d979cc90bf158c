"""Use and sharing of the KV pool."""
