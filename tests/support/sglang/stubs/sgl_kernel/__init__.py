"""Stands for SGLang's kernels, of which there is no CPU wheel: models of the Llama kind run on SGLang's torch paths."""

from absent import functions_of

__version__ = "0.4.10"
__getattr__ = functions_of("sgl_kernel")
