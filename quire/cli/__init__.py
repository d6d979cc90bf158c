"""The command line of Quire; needs the extra `cli`."""
