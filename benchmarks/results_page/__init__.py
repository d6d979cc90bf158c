"""The page of all results: `docs/results.md`, made of the JSON files alone."""
