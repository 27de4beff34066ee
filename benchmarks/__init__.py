"""Benchmarks of seminode and other libraries. Most files are commands, `python -m benchmarks.<name>`."""
