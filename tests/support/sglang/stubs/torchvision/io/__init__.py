"""See the package."""

import enum

from absent import functions_of

__getattr__ = functions_of("torchvision.io")


class ImageReadMode(enum.Enum):
    UNCHANGED = 0
    GRAY = 1
    RGB = 3
