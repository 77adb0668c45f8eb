"""Conversions between token formats: each format is a source, a target, or both, and one run executes all of them."""
