"""Measurements of the host of a GPU without one: the driver is a stub."""
