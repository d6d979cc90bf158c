"""The workers as the scheduler sees them: registered, connected, driven step by step."""
