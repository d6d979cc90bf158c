"""The client SDK of Quire. Knows only the wire: neither torch nor redis."""
