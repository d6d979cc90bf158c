"""The journal and the request records, in Redis or in memory: all Redis code of the project."""
