"""Where the router has its workers from. Each source gives `fleet.workers` its whole list whenever that changes; one
that fails leaves its last list as it was."""
