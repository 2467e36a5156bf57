"""See the package."""

from absent import functions_of

__getattr__ = functions_of("sgl_kernel.mamba")
