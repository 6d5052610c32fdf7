"""What only the dock over Ray has to show: processes, shared memory, deaths."""

import asyncio
import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import sys
import threading
import time

import pytest
import ray
import torch

from mindspeed_rl.common.errors import DockError, DockTimeout, RowsLost
from mindspeed_rl.transfer_dock.ray_dock import RayTransferDock
from mindspeed_rl.transfer_dock.spec import NOT_YET, ColumnSpec, ConsumerSpec, DockSpec
from mindspeed_rl.transfer_dock.wire import Connection, Endpoint, ServerConnection, listen

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module
LARGE = 4_000_000  # int64: 32 MB a row


@pytest.fixture(scope="module", autouse=True)
def cluster():
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=300 << 20)
    yield
    ray.shutdown()


def make_dock(**limits):
    columns = {"seed": ColumnSpec("int64", "scalar"), "tokens": ColumnSpec("int64")}
    consumers = {"make": ConsumerSpec(("seed",), puts=("tokens",)), "train": ConsumerSpec(("tokens",))}
    return RayTransferDock.create(DockSpec(columns, consumers, **limits), num_cpus=0)


def private_bytes(pid):
    """Memory of a process without what it shares with others."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        fields = {line.split()[0]: line.split()[1] for line in file if line.split()[-1] == "kB"}
    return 1024 * (int(fields["Private_Clean:"]) + int(fields["Private_Dirty:"]))


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, dock):
        torch.set_num_threads(1)
        self.dock, self.kept = dock, None

    def pid(self):
        return os.getpid()

    def put(self, rows, length):
        self.dock.put(0, rows, {"tokens": [torch.arange(length) + row for row in rows]})

    def get(self, pickled):
        """As a rank that was sent a claim by other means than Ray: with Python's pickle."""
        claim = pickle.loads(pickled)
        before = private_bytes(os.getpid())
        self.kept = self.dock.get(claim, ["tokens"])["tokens"]
        sums = [int(values.sum()) for values in self.kept]
        return sums, private_bytes(os.getpid()) - before

    def claim_and_hang(self, seconds=600):
        claim = self.dock.claim("train", 0, 1)
        time.sleep(seconds)
        self.dock.ack(claim)

    def make(self, count):
        """As a stage: claims rows and hands in results."""
        claim = self.dock.claim("make", 0, count)
        seeds = self.dock.get(claim, ["seed"])["seed"].tolist()
        self.dock.ack(claim, {"tokens": [torch.arange(1000) * seed for seed in seeds]})
        return claim.rows

    def die_at_put(self):
        client = self.dock._client
        request = client.request

        def dying(method, *arguments, **options):
            if method == "put":  # the values are in the object store by now
                os.kill(os.getpid(), signal.SIGKILL)
            return request(method, *arguments, **options)

        client.request = dying
        self.make(1)

    def put_seed(self):
        self.dock.put(0, [0], {"seed": [3]})

    def look(self):
        return self.dock.stats()

    def kept_payloads(self):
        return len(self.dock._client._kept)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="reads memory use from /proc")
def test_a_claim_holds_addresses_only_and_payloads_are_read_without_a_copy():
    dock = make_dock()
    dock.begin(0, 3, 1, 3)
    producer, reader = Worker.remote(dock), Worker.remote(dock)
    ray.get(producer.put.remote([0, 1, 2], LARGE))
    claim = dock.claim("train", 0, 3)
    pickled = pickle.dumps(claim)
    assert len(pickled) < 2000
    sums, grown = ray.get(reader.get.remote(pickled))
    assert sums == [LARGE * (LARGE - 1) // 2 + LARGE * row for row in claim.rows]
    assert grown < LARGE, f"a reader of {3 * 8 * LARGE} bytes grew by {grown}"
    dock.ack(claim)


def test_rows_of_a_killed_consumer_come_back():
    dock = make_dock(lease_seconds=3.0)
    dock.begin(0, 1, 1, 1)
    dock.put(0, [0], {"tokens": [torch.arange(3)]})
    consumer = Worker.remote(dock)
    pid = ray.get(consumer.pid.remote())
    consumer.claim_and_hang.remote()
    while dock.stats()["rows_out"] == 0:
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    claim = dock.claim("train", 0, 1, timeout=20)
    assert claim.rows == (0,)
    dock.ack(claim)
    assert dock.claim("train", 0, 1) is None


def test_a_living_process_keeps_its_rows_however_long_it_takes():
    dock = make_dock(lease_seconds=1.0)
    dock.begin(0, 1, 1, 1)
    dock.put(0, [0], {"tokens": [torch.arange(3)]})
    slow = Worker.remote(dock).claim_and_hang.remote(4)
    while dock.stats()["rows_out"] == 0:
        time.sleep(0.05)
    assert dock.claim("train", 0, 1, timeout=20) is None
    ray.get(slow)


def get_until_lost(dock, claim, column):
    """Ray takes a moment to notice a death."""
    for _ in range(200):
        dock.get(claim, [column])
        dock._reader.forget(lambda _: True)
        time.sleep(0.1)


def test_what_a_dead_process_made_is_made_again():
    dock = make_dock()
    dock.begin(0, 4, 1, 4)
    dock.put(0, range(4), {"seed": [5, 6, 7, 8]})
    first, second = Worker.remote(dock), Worker.remote(dock)
    assert ray.get(first.make.remote(2)) == (0, 1)
    assert ray.get(second.make.remote(2)) == (2, 3)
    done = dock.claim("train", 0, 1)
    dock.get(done, ["tokens"])
    dock.ack(done)
    os.kill(ray.get(first.pid.remote()), signal.SIGKILL)
    claim = dock.claim("train", 0, 3)
    with pytest.raises(RowsLost, match=r"rows of iteration 0 .* made again: 'make' of iteration 0: rows 1$"):
        get_until_lost(dock, claim, "tokens")
    with pytest.raises(DockError, match="is not held"):
        dock.ack(claim)
    assert dock.stats()["rows_redone"] == 1, "row 0 was trained on and is needed no more"
    assert ray.get(second.make.remote(4)) == (1,)
    claim = dock.claim("train", 0, 3)
    assert claim.rows == (1, 2, 3)
    assert [values[1].item() for values in dock.get(claim, ["tokens"])["tokens"]] == [6, 7, 8]
    dock.ack(claim)
    assert dock.claim("train", 0, 1) is None


def test_what_nobody_makes_is_reported_lost_by_name():
    dock = make_dock()
    dock.begin(0, 1, 1, 1)
    producer = Worker.remote(dock)
    ray.get(producer.put_seed.remote())
    os.kill(ray.get(producer.pid.remote()), signal.SIGKILL)
    claim = dock.claim("make", 0, 1)
    with pytest.raises(RowsLost, match="made again: nothing"):
        get_until_lost(dock, claim, "seed")
    for ask in (dock.claim, dock.try_claim):
        with pytest.raises(DockError, match=r"'seed' of 1 rows \(0\) of iteration 0 is lost .* put it again"):
            ask("make", 0, 1)
    dock.put(0, [0], {"seed": [3]})
    assert dock.get(dock.claim("make", 0, 1), ["seed"])["seed"].tolist() == [3]


def test_a_producer_frees_what_it_kept_when_an_iteration_is_cleared():
    dock = make_dock()
    producer = Worker.remote(dock)
    for iteration in range(2):
        dock.begin(iteration, 2, 1, 2)
    ray.get(producer.put.remote([0, 1], 1000))
    assert ray.get(producer.kept_payloads.remote()) == 1
    dock.clear(0)
    ray.get(producer.look.remote())
    deadline = time.monotonic() + 20
    while ray.get(producer.kept_payloads.remote()):  # a sign of life may have got the answer, in another thread
        assert time.monotonic() < deadline
        time.sleep(0.05)


def claim_twice(dock):
    """A controller may answer once more before it dies of `ray.kill`; the second claim has to wait for the first."""
    for _ in range(2):
        dock.claim("train", 0, 1, timeout=20)


def test_a_dead_controller_is_reported_and_its_snapshot_goes_on():
    dock = make_dock()
    dock.begin(0, 2, 1, 2)
    dock.put(0, [0, 1], {"tokens": [torch.arange(3), torch.arange(4)]})
    dock.ack(dock.claim("train", 0, 1))
    snapshot = dock.snapshot()
    ray.kill(dock._controller)
    with pytest.raises(DockError, match=r"the TransferDock controller died \('claim' was called\)"):
        claim_twice(dock)
    dock = make_dock()
    dock.restore(snapshot)
    claim = dock.claim("train", 0, 2)
    assert claim.rows == (1,)
    assert dock.get(claim, ["tokens"])["tokens"][0].tolist() == [0, 1, 2, 3]


def test_a_controller_that_finds_no_cpu_is_reported():
    with pytest.raises(DockTimeout, match=r"did not start within 1\.0 s: it needs 64 free CPUs"):
        RayTransferDock.create(DockSpec({}, {}), num_cpus=64, start_timeout=1.0)


def test_every_waiting_process_notices_a_dead_controller_within_seconds_and_keeps_nothing_for_it():
    dock = make_dock()
    dock.begin(0, 2, 1, 2)
    workers = [Worker.remote(dock) for _ in range(2)]
    ray.get(workers[0].put.remote([0], 10))
    dock.put(0, [1], {"tokens": [torch.arange(3)]})
    held = dock.claim("train", 0, 2)
    waiting = [worker.claim_and_hang.remote() for worker in workers]
    time.sleep(1)
    ray.kill(dock._controller)
    start = time.monotonic()
    for call in waiting:
        with pytest.raises(DockError, match="controller died"):
            ray.get(call, timeout=15)
    assert time.monotonic() - start < 15
    assert ray.get(workers[0].kept_payloads.remote()) == 0
    with pytest.raises(DockError, match="controller died"):
        dock.ack(held)


def test_a_put_whose_process_dies_before_its_request_leaves_nothing():
    dock = make_dock(lease_seconds=1.0)
    dock.begin(0, 1, 1, 1)
    dock.put(0, [0], {"seed": [3]})
    before = dock.stats()

    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(Worker.remote(dock).die_at_put.remote())
    assert dock.stats()["bytes_put"] == before["bytes_put"]
    assert dock.try_claim("train", 0, 1) is NOT_YET
    claim = dock.claim("make", 0, 1, timeout=20)
    assert claim.rows == (0,)
    dock.ack(claim, {"tokens": [torch.arange(3)]})
    dock.clear(0)
    with pytest.raises(DockError, match="iteration 0 has been cleared"):
        dock.put(0, [0], {"tokens": [torch.arange(3)]})


def test_a_snapshot_goes_on_without_what_died_with_its_process():
    dock = make_dock()
    dock.begin(0, 2, 1, 2)
    dock.put(0, [0, 1], {"seed": [3, 4]})
    maker = Worker.remote(dock)
    ray.get(maker.make.remote(1))
    claim = dock.claim("make", 0, 1)
    dock.ack(claim, {"tokens": [torch.arange(4)]})
    os.kill(ray.get(maker.pid.remote()), signal.SIGKILL)
    while not dock.stats()["rows_redone"]:  # Ray takes a moment to notice a death
        snapshot = None  # what is held is still there
        time.sleep(0.1)
        snapshot = dock.snapshot()
    dock = make_dock()
    dock.restore(snapshot)
    claim = dock.claim("make", 0, 2)
    assert claim.rows == (0,)
    assert dock.get(claim, ["seed"])["seed"].tolist() == [3]
    dock.ack(claim, {"tokens": [torch.arange(3)]})
    assert [len(values) for values in dock.get(dock.claim("train", 0, 2), ["tokens"])["tokens"]] == [3, 4]


def test_no_tensor_passes_through_the_controller(monkeypatch):
    dock = make_dock()
    sizes = {}
    send = Connection.send

    def record(connection, message, look):
        sizes[message[3]] = max(sizes.get(message[3], 0), len(pickle.dumps(message)))
        return send(connection, message, look)

    monkeypatch.setattr(Connection, "send", record)
    dock.begin(0, 4, 1, 4)
    dock.put(0, range(4), {"seed": [1, 2, 3, 4]})
    claim = dock.claim("make", 0, 4)
    dock.ack(claim, {"tokens": [torch.arange(1_000_000) for _ in range(4)]})  # 32 MB
    claim = dock.claim("train", 0, 4)
    assert dock.get(claim, ["tokens"])["tokens"][3][-1] == 999_999
    assert len(pickle.dumps(claim)) < 2000
    dock.ack(claim)
    assert {"begin", "put", "claim", "ack"} <= set(sizes)
    assert max(sizes.values()) < 2000, sizes


def test_rows_granted_to_a_claim_that_was_given_up_are_released():
    dock = make_dock()
    dock.begin(0, 1, 1, 1)
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            dock.claim("train", 0, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    dock.put(0, [0], {"tokens": [torch.arange(3)]})  # granted to the claim that nobody waits for any more
    dock.stats()
    claim = dock.claim("train", 0, 1, timeout=20)
    assert claim.rows == (0,)


@contextlib.contextmanager
def connections_made():
    """The connections that are made inside, by any thread."""
    connections, connect = [], Connection.__init__

    def remember(connection, *arguments):
        connections.append(connection)
        connect(connection, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "__init__", remember)
        yield connections


def test_rows_granted_to_a_connection_that_is_gone_are_released():
    dock = make_dock(renew_leases=False)  # no other thread connects
    dock.begin(0, 1, 1, 1)
    waiting = threading.Thread(target=lambda: suppressed(lambda: dock.claim("train", 0, 1, timeout=5)), daemon=True)
    with connections_made() as connections:
        waiting.start()
        while not connections or not dock.stats():
            time.sleep(0.05)
        time.sleep(0.2)  # for its claim to be sent
    connections[0]._socket.shutdown(socket.SHUT_RDWR)
    waiting.join()
    dock.put(0, [0], {"tokens": [torch.arange(3)]})
    assert dock.claim("train", 0, 1, timeout=20).rows == (0,)


def suppressed(call):
    with contextlib.suppress(DockError):
        call()


def ask_often(connection):
    """The other side closes it, sooner or later."""
    for number in range(2, 12):
        connection.send((number, 0, "client", "stats", ()), pytest.fail)
        connection.receive(pytest.fail)


def test_who_does_not_know_the_key_is_not_listened_to():
    dock = make_dock()
    endpoint = dock._endpoint
    stranger = Connection(dataclasses.replace(endpoint, key=b"guessed"), pytest.fail, 10.0)
    with pytest.raises(OSError):  # noqa: PT011 - which one, depends on who is first
        ask_often(stranger)
    dock.begin(0, 1, 1, 1)  # the others go on


def test_what_cannot_be_unpickled_ends_the_connection_and_nothing_else():
    dock = make_dock()
    client = Connection(dock._endpoint, pytest.fail, 10.0)
    client.send((1, 0, "client", "stats", ()), pytest.fail)
    assert client.receive(pytest.fail)[:2] == (1, True)
    client._unsent = memoryview((8).to_bytes(8, "little") + b"nonsense")
    with pytest.raises(OSError):  # noqa: PT011
        ask_often(client)
    dock.begin(0, 1, 1, 1)


def test_messages_arrive_whole_whatever_pieces_they_come_in():
    listener = listen()
    received = []
    texts = ["x" * size for size in (0, 1, 70_000, 3)]

    async def serve():
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def receive(connection, message):
            received.append(message)
            connection.send(message)
            if len(received) == len(texts):
                loop.call_later(0.5, done.set_result, None)

        server = await loop.create_server(lambda: ServerConnection(b"key", receive, lambda _: None), sock=listener)
        async with server:
            await done

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    client = Connection(Endpoint("localhost", listener.getsockname()[1], b"key"), pytest.fail, 10.0)
    frames = [pickle.dumps(text, protocol=5) for text in texts]
    stream = bytes(client._unsent) + b"".join(len(frame).to_bytes(8, "little") + frame for frame in frames)
    for start in range(0, len(stream), 997):
        client._socket.sendall(stream[start : start + 997])
    client._unsent = memoryview(b"")
    assert [client.receive(pytest.fail) for _ in texts] == texts
    thread.join()
    assert received == texts


def test_a_message_sent_twice_counts_once_and_a_lost_answer_gives_its_rows_back():
    dock = make_dock(renew_leases=False)
    dock.begin(0, 2, 1, 2)
    dock.put(0, [0, 1], {"tokens": [torch.arange(3)] * 2})
    client = Connection(dock._endpoint, pytest.fail, 10.0)
    claim = (1, 0, "client", "claim", ("train", 0, 1, 0, 60.0))
    client.send(claim, pytest.fail)
    client.send(claim, pytest.fail)  # as after an interrupt between sending and noting that it was sent
    assert client.receive(pytest.fail)[2].rows == (0,)
    client.send((2, 0, "client", "stats", ()), pytest.fail)  # the answer to 1 has not arrived, it says
    assert client.receive(pytest.fail)[:2] == (2, True)
    client.send((3, 2, "client", "claim", ("train", 0, 2, 0, 60.0)), pytest.fail)
    assert client.receive(pytest.fail)[2].rows == (0, 1)
    client.send((4, 3, "client", "stats", ()), pytest.fail)
    assert client.receive(pytest.fail)[2]["rows_out"] == 2


@pytest.mark.parametrize("message", ["hello", (1, 2), (1, 0, "client", "no_such_method", ())])
def test_a_request_that_is_none_harms_nobody_else(message):
    dock = make_dock()
    client = Connection(dock._endpoint, pytest.fail, 10.0)
    client.send(message, pytest.fail)
    with contextlib.suppress(OSError):
        assert client.receive(pytest.fail)[1] is False
    dock.begin(0, 1, 1, 1)


def test_signs_of_life_go_on_after_a_broken_connection():
    dock = make_dock(lease_seconds=3)
    dock.begin(0, 1, 1, 1)
    dock.put(0, [0], {"tokens": [torch.arange(3)]})
    with connections_made() as connections:
        claim = dock.claim("train", 0, 1)
        time.sleep(0.5)  # for the thread that gives them to connect
    for connection in connections:
        with contextlib.suppress(OSError):
            connection._socket.shutdown(socket.SHUT_RDWR)
    time.sleep(5)
    with contextlib.suppress(DockError):  # it finds the connection broken; the next one has a new one
        dock.stats()
    assert dock.try_claim("train", 0, 1) is NOT_YET  # not handed out again
    dock.ack(claim)
    assert dock.stats()["rows_out"] == 0
