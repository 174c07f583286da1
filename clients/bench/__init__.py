"""Benchmarks against real servers: ``python -m clients.bench.<day0|swaps|capture_cost> --help``."""
