"""The tests, as a package: their helpers are ``tests.support``."""
