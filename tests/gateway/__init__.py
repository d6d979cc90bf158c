"""Tests of the gateway, over real HTTP on real services."""
