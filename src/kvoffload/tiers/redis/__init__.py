"""The tier in Redis or Valkey: its settings, and its client, which needs no other package."""
