"""A model folder: its files read within bounds, each fault refused with the file and the key. Loads no torch."""
