"""The two halves of the connector, engine-neutral."""
