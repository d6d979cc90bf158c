"""The gRPC services that the scheduler answers. Handlers translate and raise; others do the work."""
