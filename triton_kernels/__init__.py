"""Device kernels for KV pages: gather, scatter and checksum, each with a reference of the same signature.

``kernels`` holds the launches (Triton; its interpreter without a GPU), ``reference`` the same in torch.
"""
