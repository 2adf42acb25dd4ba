"""``kvoffload doctor``: checks a configuration and its machine before a deployment."""
