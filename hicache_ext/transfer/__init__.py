"""Moves KV bytes between device and host; knows torch, knows nothing of SGLang's scheduler."""
