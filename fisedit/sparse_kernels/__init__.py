"""Kernels on compact rows: `ops` is the face and the only switch, `reference` the specification, `cpu` the fast one."""
