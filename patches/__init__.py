"""Patch series for SGLang, one folder a release; packaged as ``hicache_ext.patches``."""
