"""The worker: owns a model's weights and the KV pool of one device, and executes steps. Knows no requests."""
