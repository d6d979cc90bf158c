"""Tests, one folder per part. Helpers that several parts use stand here, beside the folders."""
