"""The kernels in Triton, for CUDA devices, and in its interpreter on any other."""
