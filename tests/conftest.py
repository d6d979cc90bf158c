"""Fixtures that several parts use."""

from tests.valkey import valkey

__all__ = ["valkey"]
