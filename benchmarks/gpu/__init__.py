"""Programs that need a GPU; on a CPU they run in small, as a smoke test."""
