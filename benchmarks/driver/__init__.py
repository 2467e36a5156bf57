"""What benchmarks/load_driver.py runs against, and beside."""
