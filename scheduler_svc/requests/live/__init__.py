"""Live requests: from admission to the end, their output, and who reads it."""
