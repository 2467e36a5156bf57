"""The contract of lanes: what every lane must do, as checks that take a maker of lanes (``suite.CHECKS``)."""
