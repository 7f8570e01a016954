"""The Triton backend: one module for each group of kernels, and `backend`, which gathers them.

`tuning.TRITON_ROWS` says where they were measured to be faster than torch's. The
parameters of `triton.jit` kernels are pointers, sizes and strides; the limit on a function's parameters excludes them.
"""
