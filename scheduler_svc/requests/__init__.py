"""Requests: what may come in, what is live, what readers see of it."""
