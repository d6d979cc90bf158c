"""Real services, tried by schemathesis against their own OpenAPI document."""
