"""``kvoffload doctor``: checks a configuration, and what it would run on, before a server does."""
