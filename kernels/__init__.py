"""Operations on the paged KV cache and on logits: Triton kernels, and the references that define them.

Keep this file without code: another distribution has the same import name, and other libraries probe for it.
"""
