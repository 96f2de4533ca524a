"""The object store behind `KVFerryOffloadingSpec`: a directory, and a server that speaks S3."""

from __future__ import annotations

import http.client
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

from kvferry_e2e.contract.engine import BLOCK_TOKENS
from kvferry_e2e.contract.offload import Node, folder, loaded, node
from kvferry_e2e.contract.parallelism import HALVES
from kvferry_e2e.report import Note, SkippedError, ensure

BUCKET = "kvferry"


class Directory:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.settings: dict[str, Any] = {"object": f"file://{path}"}

    def count(self) -> int:
        return sum(it.is_file() for it in self._path.rglob("*"))


@contextmanager
def directory() -> Iterator[Directory]:
    with tempfile.TemporaryDirectory(prefix="kvferry-objects-") as name:
        yield Directory(Path(name))


class S3:
    """A bucket of moto's server, in this process."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._port = server.get_host_and_port()[1]
        # moto keeps buckets by name for as long as the process lives.
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", f"/{BUCKET}")
        self.settings: dict[str, Any] = {
            "object": f"s3://{BUCKET}/cache",
            "object_options": {
                "aws_endpoint_url": f"http://127.0.0.1:{self._port}",
                "aws_access_key_id": "key",
                "aws_secret_access_key": "secret",
                "aws_allow_http": True,
                "absent_for": 0,
                "retries": 0,
            },
        }

    def _ask(self, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            text = answer.read()
            ensure(answer.status == 200, f"{method} {path}: {answer.status} {text!r}")
            return text
        finally:
            connection.close()

    def count(self) -> int:
        listed = ElementTree.fromstring(self._ask("GET", f"/{BUCKET}?list-type=2&max-keys=1000"))
        keys = [it.text or "" for it in listed.iter() if it.tag.endswith("Key")]
        # That one says that objects can be read, to hosts that may not list.
        return sum(not key.endswith("/hello") for key in keys)

    def stop(self) -> None:
        self._server.stop()


@contextmanager
def s3() -> Iterator[S3]:
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise SkippedError(f"moto, a server that speaks S3, can't be imported: {error}") from error
    # It logs each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    cloud = ("AWS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith(cloud)}
    with mock.patch.dict(os.environ, others, clear=True):
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        try:
            yield S3(server)
        finally:
            server.stop()


Kept = Callable[[], AbstractContextManager[Any]]


def _uploaded(engine: Node) -> int:
    stores = [worker._opened.store for worker in engine.workers()]
    for store in stores:
        ensure(store.flush_objects(20), "not uploaded within 20 s")
    return sum(int(store.stats()["uploaded"]) for store in stores)


def second_host(suite: Any, kept: Kept, before: dict[str, Any], after: dict[str, Any], note: Note) -> None:
    """test_lookup_retry: an engine on an empty disk loads what another host has put; look-ups say RETRY until it is
    here.
    """
    prompts = [suite.prompts.fresh(length) for length in (20, 133, 400)]
    with folder() as disk, kept() as objects:
        with node(suite.model, disk, settings=objects.settings, **before) as first:
            for prompt in prompts:
                first.answer(prompt)
            uploaded = _uploaded(first)
        ensure(uploaded == objects.count() > 0, f"{uploaded} uploaded, {objects.count()} objects")
        with node(suite.model, disk.with_name("other"), settings=objects.settings, **after) as second:
            found = [loaded(second.answer(prompt)) for prompt in prompts]
            strange = loaded(second.answer(suite.prompts.fresh(100)))
            ensure(strange == 0, "a prompt that was never stored was loaded")
            second.settled()
            ensure(second.manager.prefetches > 0, "no prefetch was begun")
    least = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts]
    ensure(all(got >= want for got, want in zip(found, least, strict=True)), f"loaded {found} of {least}")
    note.text = f"{uploaded} objects, tokens loaded: {found}"


def away(suite: Any, note: Note) -> None:
    """A server that ends while engines serve costs hits: requests are computed, and what the disk has is loaded."""
    with folder() as disk, s3() as objects, node(suite.model, disk, settings=objects.settings) as first:
        before, after = suite.prompts.fresh(200), suite.prompts.fresh(200)
        first.answer(before)
        _uploaded(first)
        with node(suite.model, disk.with_name("other"), settings=objects.settings) as second:
            objects.stop()
            ensure(loaded(second.answer(before)) == 0, "loaded from a server that has ended")
            for _ in range(3):
                second.answer(suite.prompts.fresh(100))
            ensure(second.manager._opened.store.stats()["is_away"] == 1, "the server is not taken for away")
            second.forget()
            ensure(loaded(second.answer(before)) == 192, "what was computed is not found on the disk")
            second.settled()
        first.answer(after)
        first.forget()
        found = [loaded(first.answer(prompt)) for prompt in (before, after)]
        ensure(found == [192, 192], f"{found} tokens were loaded from the disk")
        first.settled()


def checks(suite: Any) -> Iterator[tuple[str, Callable[[Note], None]]]:
    kinds: tuple[dict[str, Any], ...] = tuple({"kind": kind} for kind in ("full", "window"))
    for kind in kinds:
        yield f"an object store, {kind['kind']}", partial(second_host, suite, directory, kind, kind)
        for asynchronous in (False, True):
            how = f"{kind['kind']}{', async' if asynchronous else ''}"
            engine = {**kind, "asynchronous": asynchronous}
            yield f"S3, {how}", partial(second_host, suite, s3, engine, engine)
    yield "S3, TP 2 to TP 1", partial(second_host, suite, s3, {"ranks": 2}, {"ranks": 1})
    yield "S3, PP 2", partial(second_host, suite, s3, {"stages": HALVES}, {"stages": HALVES})
    yield "S3 that ends", partial(away, suite)
