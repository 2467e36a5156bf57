"""Packages called as NIXL's are, and what says of which version they are (without a RECORD, so that no installer takes
them for something to remove). This directory goes to the front of PYTHONPATH by ``kvxfer nixl --``; it holds nothing
else."""
