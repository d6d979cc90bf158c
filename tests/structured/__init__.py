"""Structured outputs by the thousand: random constraints, each answer checked, also after faults."""
