"""NIXL's package, on kvxfer; see :mod:`kvxfer.connectors.nixl.shim`. Decides nothing."""

try:
    from kvxfer.connectors.nixl.shim import fill
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "kvxfer":
        raise
    raise ImportError(
        "this program runs under `kvxfer nixl`, but kvxfer is not installed for the Python that runs it: "
        "pip install kvxfer there"
    ) from error

fill(__name__)
