"""See the package."""

from absent import functions_of

from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode"]
__getattr__ = functions_of("torchvision.transforms.v2.functional")
