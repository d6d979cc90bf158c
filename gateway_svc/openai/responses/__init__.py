"""OpenAI's Responses API, for text: responses are created, streamed, resumed, retrieved, cancelled and deleted."""
