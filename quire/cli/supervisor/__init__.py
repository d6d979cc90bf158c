"""`quire serve`: the services of one machine as processes, started, watched, restarted and ended."""
