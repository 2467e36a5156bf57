"""Stands for torchvision, of which there is no CPU wheel that loads beside torch here: text models use none of it."""

__version__ = "0.28.0"
