"""Benchmarks of seminode against its peers; each file is a command, `python -m benchmarks.<name>`."""
