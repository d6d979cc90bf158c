"""OpenAI's API: completions, chat completions and models, with the fields, errors and events of its clients."""
