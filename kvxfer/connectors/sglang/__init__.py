"""kvxfer inside SGLang: a transfer backend for prefill/decode disaggregation. See docs/sglang.md.

Importing this package loads neither SGLang nor torch.
"""
