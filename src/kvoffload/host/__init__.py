"""Host memory for offloaded blocks."""
