"""Anthropic's API: messages, counts of tokens and models, with the fields, errors and events of its clients."""
