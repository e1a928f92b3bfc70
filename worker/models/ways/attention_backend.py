"""Which of the kernels attends, and whether it is the one that was asked for."""

from __future__ import annotations

from ....kernels.dispatch import AUTO
from ....kernels.paged_attention import backend_of
from ....shared.errors import ConfigurationError
from ..forward import Forward
from ..lean.native import NativeForward
from .attention_call import AttentionCall

# What attends where no kernel of ours does.
OWN_CODE = "transformers"


def check_attention_backend(forward: Forward, wanted: str, architecture: str, *, is_batch_invariant: bool) -> str:
    """Verify that ``wanted`` attends, and not something else in its place; return the name of what does.

    Raises:
        ConfigurationError: it cannot; says what would.
    """
    found = _attention_backend_of(forward, wanted, is_batch_invariant=is_batch_invariant)
    return check_backend(found, wanted, architecture)


def check_backend(found: str, wanted: str, architecture: str) -> str:
    """Verify that what attends is ``wanted``; return ``found``.

    Raises: as ``check_attention_backend``.
    """
    if wanted not in (AUTO, found):
        raise ConfigurationError(
            f"attention_backend is {wanted!r}, but the attention of {architecture} is computed by {found} here; "
            "use attention_backend 'auto'"
        )
    return found


def _attention_backend_of(forward: Forward, wanted: str, *, is_batch_invariant: bool) -> str:
    """Return the name of what attends: one of ``kernels.dispatch.BACKENDS``, several with " + ", or ``OWN_CODE``."""
    if isinstance(forward, NativeForward):
        return "native"
    if not forward.attention_calls:
        return OWN_CODE
    device = next(forward.network.parameters()).device

    def of_call(call: AttentionCall) -> str:
        if call.has_own_rule:
            return "reference"  # the rule is a Python callable, and no kernel can call it
        dims = call.key_shape[1], call.value_shape[1]
        dtypes = call.dtype, call.cache_format.dtype
        return backend_of(device, *dtypes, dims, backend=wanted, is_batch_invariant=is_batch_invariant)

    return " + ".join(dict.fromkeys(map(of_call, forward.attention_calls)))
