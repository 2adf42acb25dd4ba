"""Tiers in stores that other machines serve: the tier, the process that talks to the store, and what they exchange."""
