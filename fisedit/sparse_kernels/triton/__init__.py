"""The Triton backend: one module for each group of kernels, and `backend`, which gathers them.

It was compiled for GPUs and run by Triton's interpreter, but not measured on a GPU yet; see `tuning.TRITON_ROWS`. The
parameters of `triton.jit` kernels are pointers, sizes and strides; the limit on a function's parameters excludes them.
"""
