"""Types every package shares: ids, KV geometry, sampling parameters, grants, seals, hashes. No I/O."""
