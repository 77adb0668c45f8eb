"""Converters between token formats. Each format is a source, a writer, or both. They meet in `pipeline/run.py`."""
