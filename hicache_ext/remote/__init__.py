"""The remote tier: pages of this rank in stores, behind ``core.remote.Remote``."""
