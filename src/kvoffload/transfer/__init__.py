"""How bytes move between device blocks and host slots."""
