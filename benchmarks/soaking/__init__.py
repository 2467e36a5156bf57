"""What `benchmarks/soak.py` is made of: a plan of faults, a cluster in a box, clients, a watch, and a judge."""
