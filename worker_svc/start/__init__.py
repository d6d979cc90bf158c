"""From options to an engine that can execute steps: checks before torch, loading, the choice of sizes."""
