"""Evaluations by EleutherAI's harness through the gateway, beside the same with the model in its own process."""
