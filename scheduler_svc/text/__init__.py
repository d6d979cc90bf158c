"""Text: tokenising, chat templates, detokenising, stop strings. Knows no request and no worker."""
