"""Media below host memory. ``kvoffload.abc.tier`` has their contract."""
