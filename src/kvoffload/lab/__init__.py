"""The lab replays request traces through the same managers and policies that serve an engine."""
