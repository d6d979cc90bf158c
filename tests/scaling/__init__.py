"""Parts of `python -m tests.scaling`: streams that go on while services are scaled, and deployments to scale."""
