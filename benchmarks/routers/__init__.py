"""The parts of benchmarks/router.py: what is compared, how it is loaded, and how figures are shown."""
