"""Packages called as NIXL's are. This directory goes to the front of PYTHONPATH by ``kvxfer nixl --``; it holds nothing
else."""
