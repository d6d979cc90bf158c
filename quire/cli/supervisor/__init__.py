"""The supervisor of `quire serve`: starts, watches, restarts and ends the services of one machine."""
