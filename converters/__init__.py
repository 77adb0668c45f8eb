"""Converters between token formats. A format is one file with a source, a writer, or both; they meet in `pipe.py`."""
