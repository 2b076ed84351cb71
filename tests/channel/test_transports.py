"""Ways that need more than two processes: Ray's store, groups of two; and GPUs, where there are some."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlinf.channel.broker import Broker
from rlinf.channel.codec import decode, encode
from rlinf.channel.errors import EndOfStream, PeerDied
from rlinf.channel.member import Member
from rlinf.channel.pool import Mappings, Pool
from rlinf.channel.spec import Address, ChannelSpec, Place
from rlinf.channel.transports.base import MAIN, Held, Visit
from rlinf.channel.transports.nccl import Nccl
from rlinf.channel.transports.pair import Receiver
from tests.channel.test_channel import STRUCTURES, flat

pytestmark = pytest.mark.timeout(180)
IP = "127.0.0.1"


def visit(ask: Any, device: str = "cpu") -> Visit:
    place = Place("host", "process", ip=IP)
    return Visit(1, "p", place, 1, ask, Mappings(), Pool(), place, device, 20.0)


def test_tensors_of_a_gpu_go_through_a_group_of_two() -> None:
    """With Gloo and the CPU in place of NCCL and GPUs: all but the backend is the same."""
    producer, consumer = Nccl(IP, 20.0, "gloo"), Nccl(IP, 20.0, "gloo")
    held = Held(device=[torch.arange(6.0).reshape(2, 3).t(), torch.tensor(5, dtype=torch.int64), torch.ones(0, 2)])

    def ask(*question: Any) -> Any:
        return producer.answer(held, 2, *question)

    for _ in range(3):
        found = consumer.take(visit(ask))
        assert [flat(tensor) for tensor in found] == [flat(tensor) for tensor in held.device]
    producer.close()
    consumer.close()


def test_a_producer_that_does_not_come_to_the_group_is_named() -> None:
    with pytest.raises(PeerDied, match=r"p did not meet us at 127.0.0.1:1 for gloo"):
        Receiver("gloo", "p", IP, 1, IP, 1.0)


def test_tensors_of_a_gpu_can_be_staged_on_the_host() -> None:
    pool, held = Pool(), Held(device=[torch.arange(4.0), torch.ones(2, 2)])
    offer = held.stage(pool)
    assert held.stage(pool) == offer
    block, _ = held.parts[1]
    assert [flat(t) for t in decode(block.area, offer.skeleton)] == [flat(t) for t in held.device]
    held.release(pool)
    assert pool.used == 0


def test_an_item_that_cannot_be_written_leaves_no_memory_taken() -> None:
    pool, made = Pool(), encode(torch.ones(4))
    made.host[0] = (0, "no tensor")  # type: ignore[call-overload]
    with pytest.raises(AttributeError):
        Held().lay_open(pool, MAIN, made)
    assert pool.used == 0


class RayProducer:
    """An actor with a member that puts structures."""

    def put(self, address: Address, names: list[str]) -> None:
        spec = ChannelSpec("by ray", ("p",), ("c",), transport="ray_store")
        with Member(address, "p") as member:
            channel = member.channel(spec)
            for name in names:
                channel.put(STRUCTURES[name]())
            channel.close()


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.mark.ray
def test_every_structure_goes_through_rays_store_between_actors(ray_session: Any) -> None:
    names = list(STRUCTURES)
    spec = ChannelSpec("by ray", ("p",), ("c",), transport="ray_store")
    producer = ray_session.remote(RayProducer).options(num_cpus=0).remote()
    with Broker() as broker, Member(broker.address, "c") as member:
        channel = member.channel(spec)
        sent = producer.put.remote(broker.address, names)
        for name in names:
            assert flat(channel.get(timeout=60)) == flat(STRUCTURES[name]())
        assert channel.explain() == "ray_store: 1 pairs: p -> c"
        with pytest.raises(EndOfStream):
            channel.get(timeout=20)
        ray_session.get(sent)


@pytest.mark.ray
def test_a_broker_can_be_hosted_by_an_actor(ray_session: Any) -> None:
    class Host:
        def __init__(self) -> None:
            self.broker = Broker()

        def address(self) -> Address:
            return self.broker.address

    host = ray_session.remote(Host).options(num_cpus=0).remote()
    address = ray_session.get(host.address.remote())
    spec = ChannelSpec("c", ("p",), ("c",))
    with Member(address, "p") as producer, Member(address, "c") as consumer:
        producer.channel(spec).put(torch.arange(3))
        end = consumer.channel(spec)
        assert end.get(timeout=20).tolist() == [0, 1, 2]
        end.done()


# GPUs


def put_on_gpu(address: Address, device: str, transport: str) -> None:
    spec = ChannelSpec("gpu", ("p",), ("c",), transport=transport)
    with Member(address, "p", device=device, ip=IP) as member:
        channel = member.channel(spec)
        channel.put({"gpu": torch.arange(8.0, device=device).reshape(2, 4).t(), "cpu": torch.ones(3)})
        channel.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("transport", "device"), [("cuda_ipc", "cuda"), ("nccl", "cuda"), ("", "cpu")])
def test_tensors_stay_on_gpus_and_mix_with_others(transport: str, device: str) -> None:
    import torch.multiprocessing as multiprocessing

    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    source = "cuda:1" if transport == "nccl" else "cuda:0"
    with Broker() as broker:
        process = multiprocessing.get_context("spawn").Process(
            target=put_on_gpu, args=(broker.address, source, transport)
        )
        process.start()
        with Member(broker.address, "c", device="cuda:0" if device == "cuda" else "cpu", ip=IP) as member:
            channel = member.channel(ChannelSpec("gpu", ("p",), ("c",), transport=transport))
            item = channel.get(timeout=60)
            assert item["gpu"].device.type == device
            assert item["gpu"].cpu().tolist() == torch.arange(8.0).reshape(2, 4).t().tolist()
            assert item["cpu"].tolist() == [1.0, 1.0, 1.0]
            del item
            channel.done()
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_within_a_process_tensors_on_gpus_go_as_they_are() -> None:
    spec = ChannelSpec("gpu", ("p",), ("c",))
    with (
        Broker() as broker,
        Member(broker.address, "p", device="cuda:0") as producer,
        Member(broker.address, "c", device="cuda:0") as consumer,
    ):
        end, other = producer.channel(spec), consumer.channel(spec)
        end.explain()
        item = torch.ones(3, device="cuda:0")
        end.put(item)
        assert other.get(timeout=20) is item
        other.done()


def test_threads_with_ends_of_their_own_share_one_member() -> None:
    spec = ChannelSpec("c", ("p",), ("c",), transport="shared")
    with Broker() as broker, Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
        end, found, lock = producer.channel(spec), [], threading.Lock()

        def read() -> None:
            for item in consumer.channel(spec):
                with lock:
                    found.append(int(item[0]))

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(200):
            end.put(torch.full((100,), number))
        end.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert sorted(found) == list(range(200))
