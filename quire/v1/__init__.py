"""The wire in Python: generated from `protos/quire/v1/*.proto` by `make protos`, and committed.

Using or installing Quire needs no compiler. Nothing here imports anything else of ours.
"""
