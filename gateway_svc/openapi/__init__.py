"""The description of the gateway's routes as an OpenAPI document: what they take, and what they answer."""
