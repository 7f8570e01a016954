"""Kernels on compact rows: `ops` is the interface, `reference` the specification, `torch_backend` the default."""
