"""See the package."""

from absent import functions_of

from torchvision.transforms import functional
from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode", "functional"]
__getattr__ = functions_of("torchvision.transforms")
