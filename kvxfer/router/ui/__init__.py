"""The operators' page: its files, and the state that it shows."""
