"""Operations on the paged KV cache and on logits: Triton kernels, and the references that define them.

This file stays a docstring: the import name is also that of another distribution, which other libraries probe for.
"""
