"""Tests of the SDK, the command line and the supervisor."""
