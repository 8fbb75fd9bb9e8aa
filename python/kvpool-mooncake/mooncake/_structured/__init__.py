"""Bundles of named buffers, structured objects and tables over any store: see `structured_object_store`."""
