"""Start of a worker: checks before torch is loaded, loading, the choice of sizes, the first steps."""
