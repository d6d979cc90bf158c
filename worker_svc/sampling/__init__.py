"""From logits to tokens: edits of logits, draws, candidates of beam searches, log-probabilities."""
