"""What may be wrong with a low-rank adapter; part of ``errors``, whose tree has these too."""

from __future__ import annotations

from .errors import PenstockError, ValidationError


class UnknownAdapterError(PenstockError):
    """No adapter of that name or number is registered for the model, or it is another tenant's."""

    code = "unknown_adapter"


class AdapterFileError(ValidationError):
    """The folder of an adapter lacks a file, or holds another adapter than it is known to.

    Another engine may see the folder as it should be: a request that ends with this may be sent again.
    """

    code = "adapter_file"
    retryable = True


class UnsupportedAdapterError(ValidationError):
    """The adapter is of a kind that no engine here computes; the message names what is not served."""

    code = "unsupported_adapter"
