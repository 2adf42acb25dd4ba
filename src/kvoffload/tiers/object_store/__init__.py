"""The tier in an object store: its settings, its client, and how small blocks share an object."""
