"""Benchmarks of the readers, the loader and the converters: `python -m benchmarks NAME`. Not installed."""
