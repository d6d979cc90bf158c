"""The worker as a gRPC service: registration, streams of steps, and the life of the process."""
