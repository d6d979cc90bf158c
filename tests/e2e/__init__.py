"""Tests on real processes: scheduler, workers, Valkey."""
