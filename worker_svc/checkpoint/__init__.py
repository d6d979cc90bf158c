"""A model folder: files are read within bounds, and errors name the file and the key. Loads no torch."""
