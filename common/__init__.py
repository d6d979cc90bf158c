"""Code that both sides of a wire need: conversions, errors and their status codes, rpc plumbing, settings, log set-up.

Knows neither torch nor redis.
"""
