"""What a client asks for: checked, completed with defaults, tokenized."""
