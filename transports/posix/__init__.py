"""What Linux offers to processes that share memory: words to block on, segments, liveness."""
