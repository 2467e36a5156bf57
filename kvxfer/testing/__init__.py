"""What shows that the rest is right, in two products that know nothing of each other: ``sim``, whole clusters on a
virtual clock, and ``contract``, what every lane must do. Must never be imported by anything that serves.
"""
