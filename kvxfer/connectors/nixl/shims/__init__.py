"""Packages called as NIXL's are, and what says of which version they are: as egg-info, because builders of wheels leave
any dist-info but the wheel's own out. This directory goes to the front of PYTHONPATH by ``kvxfer nixl --``; it holds
nothing else."""
