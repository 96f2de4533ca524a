"""Addresses as texts: ``host:port``, ``[v6]:port``, a host alone, or a port alone, which is every interface."""

from __future__ import annotations


def split(address: str) -> tuple[str, str]:
    """Host and port, each empty if it is missing. A host of IPv6 has no brackets."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    if address.isdigit():
        return "", address
    if address.count(":") > 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port


def join(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(address: str) -> str:
    """The address; with port 0, by which the kernel chooses one, if it has none."""
    host, port = split(address)
    return join(host, port or 0)


def has_port(address: str) -> bool:
    return split(address)[1].isdigit()


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"
