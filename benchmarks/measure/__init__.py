"""Parts of benchmarks/transfer.py: who takes part, how a pair of turns is measured, and how it is written down."""
