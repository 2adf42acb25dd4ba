"""Readers of request traces, one file a format."""
