"""Media below host memory. ``base`` has their contract."""
