"""Stores that lie elsewhere: objects in buckets and behind HTTP, and the cache of this node in front of them."""
