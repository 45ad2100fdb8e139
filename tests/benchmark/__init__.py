"""Speed, as ratios of one run: ``python -m tests.benchmark``. Loopback only, bounded in count and time."""
