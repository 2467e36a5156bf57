"""Parts of benchmarks/transfer.py: the contenders, how a pair of turns is measured, how it is written down."""
