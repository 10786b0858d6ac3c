"""A hostile neighbour and a hostile coordinator with valid certificates: their connection ends, the stage lives."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from stage_runtime.link.connection import LinkError, LinkTiming
from stage_runtime.link.control import PROTOCOL, KvLength, KvLengths, encode_control
from stage_runtime.link.endpoints import BoxAddress, LinkSettings, dial
from stage_runtime.link.frames import BODY_CAPS, Frame, FrameType
from stage_runtime.link.membership import Abort, Challenge, Commit, Prepare, Retire, Standby
from stage_runtime.link.messages import Hello
from tests.stage_runtime.conftest import Served
from tests.stage_runtime.site import StageSite, answer, connected, eventually, request
from tests.stage_runtime.tiny import TinyModel

AT_ONCE = 10
HARMLESS = 0.3  # share of orders that are left as they are
# an ABORT under the name of RETIRE would be a good order, and the end of what serves
KINDS = [kind for kind in FrameType if kind not in (FrameType.PING, FrameType.RETIRE)]


@pytest.fixture(scope="module")
def bothered(tmp_path_factory: pytest.TempPathFactory, untied_model: TinyModel) -> Iterator[Served]:
    """Two stages that serve, to be bothered."""
    directory = tmp_path_factory.mktemp("bothered")
    site = StageSite(directory, untied_model.directory, untied_model.digest, layers=6, tied=False, stages=2)
    for box in site.boxes:
        site.start(box)
    yield Served(site, untied_model)
    site.stop()


def orders(site: StageSite, draw: random.Random) -> list[tuple[FrameType, Any]]:
    """Orders of the right form, of which some make sense; COMMIT and RETIRE only of epochs that nobody has."""
    epoch = draw.choice([0, 1, 2, 2**63])
    plan = site.plan.pipelines["main"]
    addresses = {box: f"127.0.0.1:{port}" for box, port in site.ring_ports.items()}
    return [
        (FrameType.PREPARE, Prepare("main", 1, plan, addresses, planned=True)),
        (FrameType.PREPARE, Prepare("other", epoch, plan, addresses, planned=True)),
        (FrameType.COMMIT, Commit(draw.randrange(2, 2**64))),
        (FrameType.ABORT, Abort(epoch, "r" * draw.randrange(1000))),
        (FrameType.RETIRE, Retire(0, "")),
        (FrameType.STANDBY, Standby((draw.randrange(6),), head=draw.random() < 0.5, embedding=False)),
        (FrameType.STANDBY, Standby((draw.randrange(2**40),), head=False, embedding=False)),
        (FrameType.CHALLENGE, Challenge("n" * draw.randrange(2000))),
    ]


def spoiled(kind: FrameType, message: Any, draw: random.Random) -> Frame:
    """A message, one of its values changed into something else; or none of it left."""
    values: list[Any] = [None, -1, 2**64, 1.5, "x", [], {}, [[]], "é" * 500, True]
    data = asdict(message)
    for _ in range(draw.randrange(3)):
        inner: Any = data
        while isinstance(inner, dict) and inner:
            key = draw.choice(list(inner))
            if not isinstance(inner[key], dict) or draw.random() < 0.5:
                inner[key] = draw.choice(values)
                break
            inner = inner[key]
    body = json.dumps(data, default=list).encode() if draw.random() < 0.9 else draw.randbytes(draw.randrange(400))
    return Frame(kind, body[: BODY_CAPS[kind]], draw.choice([0, 1, 2**63]))


async def bother_by_orders(site: StageSite, count: int, seed: int) -> None:
    """A coordinator that says whatever comes to its mind; every order arrives, after a reconnection where needed."""
    draw = random.Random(seed)  # noqa: S311 - spoils messages, keeps no secret
    giver = site.giver

    def bother() -> None:
        for number in range(count):
            box = site.boxes[number % len(site.boxes)]
            kind, message = draw.choice(orders(site, draw))
            if kind in (FrameType.RETIRE, FrameType.COMMIT) or draw.random() < HARMLESS:
                frame = Frame(kind, encode_control(message))
            else:
                frame = spoiled(draw.choice(KINDS) if draw.random() < 0.1 else kind, message, draw)
            giver.wait(lambda box=box: (link := giver.stages[box].link) is not None and not link.closed_reason)
            giver.send(box, frame)

    await asyncio.to_thread(bother)


async def bother_by_frames(site: StageSite, count: int, seed: int) -> None:
    """A neighbour that says whatever comes to its mind, on links of epochs that are there and not."""
    draw = random.Random(seed)  # noqa: S311 - spoils frames, keeps no secret
    tls = site.ca.issue("box1")
    address = BoxAddress("box2", "127.0.0.1", site.ring_ports["box2"])
    lengths = KvLengths((KvLength(1, 5), KvLength(2**63, 2**40)))
    good = [FrameType.SURVEY, FrameType.AGREED, FrameType.FREE, FrameType.OPEN, FrameType.STEP, FrameType.READY]

    async def bother() -> int:
        """Frames that were sent; a link may end at the first one."""
        sent = 0
        epoch = draw.choice([1, 1, 1, 7])
        hello = Hello(PROTOCOL, "stage", "box1", "lab", site.model_digest, "exact", epoch, "t", {"ring": "x"})
        link = await dial(LinkSettings(hello, tls, LinkTiming()), address)
        try:
            for kind in (draw.choice(KINDS), draw.choice(good)):
                body = draw.randbytes(draw.randrange(300)) if draw.random() < 0.7 else encode_control(lengths)
                await link.send(Frame(kind, body, draw.choice([0, 1, 1, 7]), draw.randrange(2**32)))
                sent += 1
        except LinkError:
            return sent
        finally:
            link.close("done")
        return sent

    while count > 0:
        count -= sum(await asyncio.gather(*(bother() for _ in range(AT_ONCE))))


async def still_serves(served: Served) -> None:
    """The processes live, and the pipeline answers."""
    site = served.site
    assert all(process.poll() is None for process in site.processes.values())
    await eventually(lambda: all(site.giver.stages[box].link is not None for box in site.boxes))
    async with connected(site.client()) as client:
        assert (await answer(client, request([5, 6], 8)))[0] == served.model.greedy([5, 6], 8)
    for box in site.boxes:
        assert (await site.health(box))["epoch"] == 1


async def test_5000_orders_and_frames_leave_the_stages_serving(bothered: Served) -> None:
    await still_serves(bothered)
    await bother_by_orders(bothered.site, 2500, seed=1)
    await bother_by_frames(bothered.site, 2500, seed=2)
    await still_serves(bothered)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200, 210))
async def test_10000_more_orders_and_frames(bothered: Served, seed: int) -> None:
    await bother_by_orders(bothered.site, 5000, seed)
    await bother_by_frames(bothered.site, 5000, seed)
    await still_serves(bothered)
