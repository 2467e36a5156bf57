"""Certificates of the cluster: their names, what each name may do, files that are read again, a development CA."""
