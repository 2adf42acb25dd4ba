"""The shared directory tier: several servers, each with a folder of its own, read each other's blocks."""
