"""Device kernels for KV pages: gather, scatter and checksum, each with a reference of the same signature."""
