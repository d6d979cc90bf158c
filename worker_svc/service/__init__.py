"""The worker as a gRPC service: registration, streams of schedulers, and the life of the process."""
