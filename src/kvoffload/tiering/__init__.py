"""Host memory in front of lower tiers: lookups, promotions, writes, and the health of each tier."""
