"""NIXL's Python API, implemented by kvferry: what engines call of ``nixl._api``, for host memory and files.

    from kvferry.nixl import nixl_agent, nixl_agent_config

or, with ``KVFERRY_SHIMS=nixl`` in the environment, an unchanged ``from nixl._api import nixl_agent``.

Calls, states and exceptions are NIXL's. The differences: no thread is busy while nothing moves; a failed transfer is
"ERR", with the reason in ``handle.error``; a transfer is "DONE" or "ERR" only when nothing copies from or to its memory
any more; ``release_xfer_handle`` cancels; a peer that dies ends its transfers within seconds, and can be added again
under the same name. Both ends must be kvferry's: NIXL's own agents do not understand its metadata.

As in NIXL, addresses are those of memory that the caller keeps valid: registered memory until it is deregistered.
It needs numpy.
"""

from __future__ import annotations

from kvferry.nixl._api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
