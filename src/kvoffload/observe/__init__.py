"""What operators see: metrics, records of requests, recorded traces."""
