"""Host memory in front of lower tiers. ``kvoffload.abc.tier`` has the contract of a tier."""
