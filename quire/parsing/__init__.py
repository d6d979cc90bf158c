"""Answers of models parted into content, reasoning and tool calls. Pure functions of the text; knows no wire."""
