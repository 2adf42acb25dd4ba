"""The lab: request traces replayed through the very managers and policies that serve an engine."""
