"""Benchmarks: run as ``python -m benchmarks.<name> --help`` from the root of the checkout."""
