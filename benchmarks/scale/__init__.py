"""Growth of costs with running sequences, queued requests and the journal."""
