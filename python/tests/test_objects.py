"""The object tier of a store: a real S3 server on loopback, behind a proxy that fails; and directories."""

from __future__ import annotations

import asyncio
import http.client
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvferry
import pytest
from conftest import LOOPBACK
from faulty_proxy import Fault, FaultyProxy
from kit import Child, eventually, run_python
from moto.server import ThreadedMotoServer
from test_store import BLOCK, CAPACITY, Pool, counts, hashes


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield port
    server.stop()


@pytest.fixture(autouse=True)
def _no_cloud_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name)


class Bucket:
    """A bucket of its own, behind a proxy."""

    def __init__(self, port: int, name: str) -> None:
        self.proxy = FaultyProxy(port)
        self.url = f"s3://{name}/kv/cache"
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{name}")
        assert connection.getresponse().status == 200
        connection.close()

    def options(self, **others: str | float) -> dict[str, str | float]:
        given: dict[str, str | float] = {
            "aws_endpoint_url": self.proxy.url,
            "aws_access_key_id": "key",
            "aws_secret_access_key": "a secret that no error shows",
            "aws_allow_http": True,
            "absent_for": 0,
            "away_min": 0.02,
            "away_max": 0.05,
            "request_timeout": 20,
        }
        return given | others

    def store(self, agent: kvferry.Agent, directory: Path, **options: str | float) -> kvferry.Store:
        return kvferry.Store(agent, directory, CAPACITY, objects=self.url, object_options=self.options(**options))


@pytest.fixture
def bucket(s3_port: int, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    bucket = Bucket(s3_port, f"bucket-{abs(hash(request.node.nodeid))}")
    yield bucket
    bucket.proxy.close()


def put(bucket: Bucket, agent: kvferry.Agent, directory: Path, count: int) -> Pool:
    """Has a host put and upload blocks."""
    source = Pool(agent, count)
    with bucket.store(agent, directory / "source") as store:
        assert store.space("model@1").put(hashes(count), source.blocks).stored == count
        assert store.flush_objects(60)
        assert store.stats()["uploaded"] == count
    return source


def test_blocks_that_one_host_has_put_are_fetched_by_another(
    agent: kvferry.Agent, bucket: Bucket, tmp_path: Path, children: Callable[..., Child]
) -> None:
    child = children(
        f"""
        import kvferry
        agent = kvferry.Agent(listen="127.0.0.1:0")
        store = kvferry.Store(
            agent, {str(tmp_path / "there")!r}, {CAPACITY}, objects={bucket.url!r}, object_options={bucket.options()!r}
        )
        region = agent.allocate({20 * BLOCK})
        blocks = kvferry.Blocks(region, range(0, {20 * BLOCK}, {BLOCK}), {BLOCK})
        """
    )
    source = put(bucket, agent, tmp_path, 20)
    assert child.run(f"space = store.space('model@1'); space.lookup({hashes(20)!r})") == 0
    assert child.run(f"space.prefetch({hashes(20)!r}), space.get({hashes(20)!r}, blocks)") == (20, 20)
    assert child.run("region.read_at(0, region.nbytes)") == source.data
    assert child.run(f"store.space('model@2').prefetch({hashes(20)!r})") == 0
    assert child.run("store.close()") is None
    assert child.finish() == (0, "")
    # One request for each block each way, and one for the miss.
    # One more object tells hosts without the permission to list that they may read.
    assert (bucket.proxy.count("PUT"), bucket.proxy.count("GET")) == (21, 21)
    assert all("/kv/cache/v1/" in path for _, path in bucket.proxy.requests)


def test_a_prefetch_can_be_awaited_polled_and_waited_for(agent: kvferry.Agent, bucket: Bucket, tmp_path: Path) -> None:
    put(bucket, agent, tmp_path, 8)
    with bucket.store(agent, tmp_path / "here") as store:
        space = store.space("model@1")

        async def go() -> int:
            return await space.prefetch_async(hashes(3))

        assert asyncio.run(go()) == 3
        pending: kvferry.Pending[int] = space.prefetch_async(hashes(8))
        assert select.select([pending], [], [], 30)[0] == [pending]
        assert (pending.done(), pending.poll(), pending.wait()) == (True, 8, 8)
        assert space.prefetch(hashes(8)) == 8


@pytest.mark.parametrize("fault", ["503", "cut", "reset", "slow"])
def test_a_fault_that_passes_costs_no_hit(agent: kvferry.Agent, bucket: Bucket, tmp_path: Path, fault: Fault) -> None:
    bucket.proxy.faults = [None, fault, None, fault]
    source, target = put(bucket, agent, tmp_path, 8), Pool(agent, 8)
    bucket.proxy.faults = [None, fault, None, fault]
    with bucket.store(agent, tmp_path / "here") as store:
        space = store.space("model@1")
        assert (space.prefetch(hashes(8)), space.get(hashes(8), target.blocks)) == (8, 8)
        assert target.data == source.data
        assert (store.stats()["fetch_failed"], store.stats()["is_away"]) == (0, 0)


@pytest.mark.parametrize("fault", ["503", "cut", "reset", "hang"])
def test_a_fault_that_stays_is_a_miss_that_is_counted(
    agent: kvferry.Agent, bucket: Bucket, tmp_path: Path, fault: Fault
) -> None:
    put(bucket, agent, tmp_path, 4)
    bucket.proxy.always = fault
    # Each prefetch makes one request, which its fault ends. Only one that hangs is ended by its time.
    request_timeout = 0.3 if fault == "hang" else 20
    options = {"request_timeout": request_timeout, "retries": 0, "away_min": 3600, "away_max": 3600}
    with bucket.store(agent, tmp_path / "here", **options) as store:
        space = store.space("model@1")
        for _ in range(3):
            assert space.prefetch(hashes(4)) == 0
        stats = store.stats()
        assert (stats["fetch_failed"], stats["is_away"], stats["fetch_missed"]) == (3, 1, 0)
        # No more requests are made.
        made = len(bucket.proxy.requests)
        assert space.prefetch(hashes(4)) == 0
        assert store.stats()["fetch_missed"] == 1
        # The proxy may take a request that hangs after its time.
        assert fault == "hang" or len(bucket.proxy.requests) == made


def test_requests_of_a_fault_that_stays_are_made_again_and_counted(
    agent: kvferry.Agent, bucket: Bucket, tmp_path: Path
) -> None:
    put(bucket, agent, tmp_path, 4)
    bucket.proxy.always = "503"
    before = len(bucket.proxy.requests)
    with bucket.store(agent, tmp_path / "here", retries=2) as store:
        assert store.space("model@1").prefetch(hashes(4)) == 0
        assert store.stats()["fetch_failed"] == 1
        assert len(bucket.proxy.requests) == before + 3


def test_a_damaged_object_is_missed_counted_and_replaced(agent: kvferry.Agent, bucket: Bucket, tmp_path: Path) -> None:
    source, target = put(bucket, agent, tmp_path, 4), Pool(agent, 4)
    bucket.proxy.faults = [None, "flip"]
    with bucket.store(agent, tmp_path / "here") as store:
        space = store.space("model@1")
        # The first block is the first window, and one of the three of the second window is damaged.
        assert 1 <= space.prefetch(hashes(4)) < 4
        assert store.stats()["fetch_corrupt"] == 1
        # The engine computes the missing ones again. Only the damaged object is replaced.
        assert space.put(hashes(4), source.blocks).stored >= 1
        assert store.flush_objects(60)
    with bucket.store(agent, tmp_path / "third") as store:
        space = store.space("model@1")
        assert (space.prefetch(hashes(4)), space.get(hashes(4), target.blocks)) == (4, 4)
        assert target.data == source.data


def test_uploads_wait_for_a_server_that_is_away_and_prefetches_do_not(
    agent: kvferry.Agent, bucket: Bucket, tmp_path: Path
) -> None:
    source, target = Pool(agent, 8), Pool(agent, 8)
    with bucket.store(agent, tmp_path / "here", retries=0) as store:
        space = store.space("model@1")
        with bucket.proxy.outage():
            assert counts(space.put(hashes(8), source.blocks)) == (8, 0, 0, 0)
            assert space.get(hashes(8), target.blocks) == 8
            assert target.data == source.data
            eventually(lambda: store.stats()["is_away"] == 1)
            assert not store.flush_objects(0.05)
            assert space.prefetch(hashes(4, "other")) == 0
            assert store.stats()["uploads_waiting"] > 0
        assert store.flush_objects(60)
        stats = store.stats()
        assert (stats["uploaded"], stats["upload_dropped"], stats["is_away"]) == (8, 0, 0)
        assert stats["upload_failed"] >= 3


def test_a_store_opens_while_the_server_is_away(agent: kvferry.Agent, bucket: Bucket, tmp_path: Path) -> None:
    put(bucket, agent, tmp_path, 2)
    with bucket.proxy.outage():
        store = bucket.store(agent, tmp_path / "here", retries=0)
        assert store.space("model@1").prefetch(hashes(2)) == 0
    with store:
        eventually(lambda: store.space("model@1").prefetch(hashes(2)) == 2)


def test_nothing_but_a_prefetch_waits_for_a_server_that_hangs(
    agent: kvferry.Agent, bucket: Bucket, tmp_path: Path
) -> None:
    put(bucket, agent, tmp_path, 4)
    pool = Pool(agent, 4)
    bucket.proxy.always = "hang"
    with bucket.store(agent, tmp_path / "here", close_timeout=0) as store:
        space = store.space("model@1")
        pending = space.prefetch_async(hashes(4))
        eventually(lambda: bucket.proxy.count("GET") == 1)
        assert space.lookup(hashes(4)) == 0
        assert space.put(hashes(4, "mine"), pool.blocks).stored == 4
        store.sync()
        assert space.get(hashes(4, "mine"), pool.blocks) == 4
        assert not pending.done()
        bucket.proxy.release()
        assert pending.wait(30) == 4


def test_ctrl_c_ends_the_wait_for_a_prefetch(bucket: Bucket, tmp_path: Path, children: Callable[..., Child]) -> None:
    child = children(
        f"""
        import kvferry
        agent = kvferry.Agent(listen="127.0.0.1:0")
        store = kvferry.Store(
            agent, {str(tmp_path)!r}, {CAPACITY}, objects={bucket.url!r}, object_options={bucket.options(close_timeout=0)!r}
        )
        space = store.space("model@1")
        """
    )
    bucket.proxy.always = "hang"
    child.start(f"space.prefetch({hashes(4)!r})")
    eventually(lambda: bucket.proxy.count("GET") == 1)
    child.send(signal.SIGINT)
    with pytest.raises(Exception, match="KeyboardInterrupt"):
        child.result()
    child.run("store.close()")


@pytest.mark.parametrize("level", ["kvferry_store=info", "trace"])
def test_an_outage_and_its_end_are_one_log_line_each_without_secrets(
    level: str, bucket: Bucket, tmp_path: Path, children: Callable[..., Child]
) -> None:
    options = bucket.options(retries=0, aws_session_token="hidden token")
    child = children(START.format(directory=str(tmp_path), url=bucket.url, options=options), env={"KVFERRY_LOG": level})
    with bucket.proxy.outage():
        child.run("for _ in range(9): space.prefetch(hashes)")
        assert child.run("store.stats()['is_away']") == 1
    child.run("while store.stats()['is_away']: space.prefetch(hashes)")
    child.run("store.close()")
    status, logged = child.finish()
    lines = [line for line in logged.splitlines() if "object store" in line]
    assert (status, len(lines)) == (0, 2), logged
    assert f"WARN kvferry_store::tiers::objects: the object store {bucket.url} fails" in lines[0]
    assert f"INFO kvferry_store::tiers::objects: the object store {bucket.url} answers again" in lines[1]
    for secret in ("hidden token", "a secret that no error shows", "Signature"):
        assert secret not in logged


def test_a_directory_is_an_object_store(agent: kvferry.Agent, tmp_path: Path) -> None:
    source, target = Pool(agent, 8), Pool(agent, 8)
    url = (tmp_path / "shared" / "bucket").as_uri()
    with kvferry.Store(agent, tmp_path / "a", CAPACITY, objects=url, object_options={"priority_min": 30}) as store:
        space = store.space("model@1")
        space.put(hashes(8), source.blocks)
        space.put(hashes(8, "unimportant"), source.blocks, priority=29)
        assert store.flush_objects()
        assert store.stats()["uploaded"] == 8
    objects = [path for path in (tmp_path / "shared").rglob("*") if path.is_file()]
    assert [path.stat().st_size for path in objects] == [128 + BLOCK] * 8
    with kvferry.Store(agent, tmp_path / "b", CAPACITY, objects=url) as store:
        space = store.space("model@1")
        assert (space.prefetch(hashes(8)), space.get(hashes(8), target.blocks)) == (8, 8)
        assert target.data == source.data


def test_settings_come_from_the_environment(
    agent: kvferry.Agent, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, agent, tmp_path, 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.proxy.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with kvferry.Store(agent, tmp_path / "here", CAPACITY, objects=bucket.url) as store:
        assert store.space("model@1").prefetch(hashes(2)) == 2


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("bucket", {}, "can't be parsed"),
        ("ftp://host/path", {}, "is no object store"),
        ("s3:///path", {}, "is no object store"),
        ("http://user:hidden@host/path", {}, "http://user@host/path is no object store"),
        ("s3://bucket", {"colour": "red"}, "colour is no option"),
        ("file:///nowhere", {"aws_region": "x"}, "aws_region is no option of a directory"),
        ("s3://bucket", {"concurrency": 0}, "concurrency is a number from 1"),
        ("s3://bucket", {"request_timeout": "soon"}, "request_timeout is a number of seconds"),
    ],
)
def test_a_url_or_an_option_that_cannot_be_used_is_named(
    agent: kvferry.Agent, tmp_path: Path, url: str, options: dict[str, str | float], says: str
) -> None:
    with pytest.raises(kvferry.InvalidArgumentError, match=says) as raised:
        kvferry.Store(agent, tmp_path, CAPACITY, objects=url, object_options=options)
    assert "hidden" not in str(raised.value)


def test_options_without_a_url_or_of_a_wrong_type_are_refused(agent: kvferry.Agent, tmp_path: Path) -> None:
    with pytest.raises(kvferry.InvalidArgumentError, match="object_options needs objects"):
        kvferry.Store(agent, tmp_path, CAPACITY, object_options={})
    for wrong in ({"concurrency": None}, {7: "x"}):
        with pytest.raises(TypeError):
            kvferry.Store(agent, tmp_path, CAPACITY, objects="s3://bucket", object_options=wrong)  # type: ignore[arg-type]


def test_missing_credentials_are_said_when_the_store_is_opened(
    agent: kvferry.Agent, bucket: Bucket, tmp_path: Path
) -> None:
    options = {k: v for k, v in bucket.options(retries=0).items() if "key" not in k}
    # Where a machine would have them: nothing listens there.
    options["aws_metadata_endpoint"] = "http://127.0.0.1:9"
    with pytest.raises(kvferry.IoError, match=r"no credentials are set.*AWS_ACCESS_KEY_ID"):
        kvferry.Store(agent, tmp_path, CAPACITY, objects=bucket.url, object_options=options)
    options["aws_access_key_id"] = "key"
    with pytest.raises(kvferry.IoError, match="SecretAccessKey"):
        kvferry.Store(agent, tmp_path, CAPACITY, objects=bucket.url, object_options=options)
    bucket.store(agent, tmp_path).close()


THREADS = """
def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        try: names.append(open(f"/proc/self/task/{task}/comm").read().strip())
        except (FileNotFoundError, ProcessLookupError): pass  # it has just ended
    return sorted(name for name in names if name.startswith(("kvferry-obj", "kvferry-store-u", "kvferry-store-d")))
"""


def test_threads_and_descriptors_of_the_object_tier_end_with_the_store(
    bucket: Bucket, tmp_path: Path, children: Callable[..., Child]
) -> None:
    child = children("import kvferry, os, time\n" + THREADS)
    code = f"""
    with kvferry.Agent(listen="127.0.0.1:0") as agent:
        with kvferry.Store(agent, {str(tmp_path / "without")!r}, {CAPACITY}) as store:
            before = threads()
        options = {bucket.options()!r}
        with kvferry.Store(
            agent, {str(tmp_path / "with")!r}, {CAPACITY}, objects={bucket.url!r}, object_options=options
        ) as store:
            region = agent.allocate(4096)
            store.space("model").put_async([os.urandom(32)], [(region, 0, 4096)]).wait()
            assert store.flush_objects(30) and store.space("model").prefetch([os.urandom(32)]) == 0
            meanwhile = threads()
        # The kernel lists a thread for a moment after it was joined.
        until = time.monotonic() + 60
        while (after := threads()) and time.monotonic() < until: time.sleep(0.01)
        del store, agent, region
    # The thread that unmaps memory ends a moment later.
    before, len(meanwhile) >= 4, after, *left()
    """
    first = child.run(code)
    assert first[:3] == ([], True, [])
    assert child.run(code) == first
    assert first[4] == 1
    assert child.finish() == (0, "")


START = """
import kvferry, os, sys
agent = kvferry.Agent(listen="127.0.0.1:0")
store = kvferry.Store(agent, {directory!r}, 64 << 20, objects={url!r}, object_options={options!r})
space = store.space("model@1")
region = agent.allocate(8 << 16)
blocks = kvferry.Blocks(region, range(0, 8 << 16, 1 << 16), 1 << 16)
hashes = [bytes([n + 1]) * 32 for n in range(8)]
"""


@pytest.mark.parametrize(
    "end",
    [
        "space.put(hashes, blocks)",
        "space.prefetch_async(hashes)",
        "pending = space.prefetch_async(hashes); del agent, store, space, region, blocks",
        "sys.keep = (store, space, space.prefetch_async(hashes))",
        "agent.shutdown()",
    ],
)
@pytest.mark.parametrize("fault", [None, "hang"])
def test_the_interpreter_exits_cleanly_with_an_object_store(
    end: str, fault: Fault | None, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.proxy.always = fault
    options = bucket.options(close_timeout=0.2)
    ended = run_python(START.format(directory=str(tmp_path), url=bucket.url, options=options) + end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_child_that_was_forked_leaves_the_object_store_to_its_parent(
    bucket: Bucket, tmp_path: Path, children: Callable[..., Child]
) -> None:
    setup = START.format(directory=str(tmp_path), url=bucket.url, options=bucket.options())
    child = children(setup)
    status = child.run(
        """
        pid = os.fork()
        if pid == 0:
            kinds = []
            for call in (lambda: space.prefetch(hashes), lambda: space.prefetch_async(hashes), store.flush_objects):
                try: call()
                except kvferry.ForkedError: kinds.append(1)
            del blocks, region, space, store, agent
            os._exit(0 if len(kinds) == 3 else 1)
        os.waitpid(pid, 0)[1]
        """
    )
    assert status == 0
    assert child.run("space.put(hashes, blocks).stored, store.flush_objects(30)") == (8, True)
    assert child.finish() == (0, "")


def test_a_store_of_another_agent_gets_the_same_blocks(bucket: Bucket, tmp_path: Path) -> None:
    with kvferry.Agent(listen=LOOPBACK) as one:
        source = put(bucket, one, tmp_path, 3)
    with kvferry.Agent(listen=LOOPBACK) as other, bucket.store(other, tmp_path / "here") as store:
        target = Pool(other, 3)
        space: Any = store.space("model@1")
        assert (space.prefetch(hashes(3)), space.get(hashes(3), target.blocks)) == (3, 3)
        assert target.data == source.data
