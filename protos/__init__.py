"""The wire: `.proto` files, and the code generated from them by `make protos`.

The generated files are committed, so that using or installing Quire needs no compiler. They import nothing of ours.
"""
