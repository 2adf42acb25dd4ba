"""Tiers in stores that other machines serve: the tier, the process of the store's client, and their messages."""
