"""Parameters of requests: checked, completed with defaults; prompts tokenised."""
