"""Which blocks are kept, in which slots, and which are evicted."""
