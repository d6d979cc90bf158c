"""What `python -m tests.compose_smoke` needs: a container engine, images, the stack of compose.yaml, and load."""
