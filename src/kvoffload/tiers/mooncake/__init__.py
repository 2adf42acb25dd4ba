"""The tier in a Mooncake Store: its settings, and its client."""
