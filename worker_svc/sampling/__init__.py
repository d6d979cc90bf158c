"""Sampling from logits: edits, draws, candidates of beam searches, log-probabilities."""
