"""Who takes more than his share: strangers at every port, and peers of the site that have gone mad."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest

from stage_runtime.link.acceptor import HANDSHAKES_AT_ONCE
from stage_runtime.link.connection import Link, LinkError, LinkTiming
from stage_runtime.link.control import PROTOCOL, Cancel, KvLengths, encode_control
from stage_runtime.link.endpoints import LINKS_OF_A_BOX, BoxAddress, LinkSettings, dial
from stage_runtime.link.frames import Frame, FrameType
from stage_runtime.link.messages import Hello
from stage_runtime.server.http import CONNECTIONS_AT_ONCE
from tests.stage_runtime.conftest import Served
from tests.stage_runtime.site import StageSite, answer, connected, eventually, request
from tests.stage_runtime.test_process import get

OWN_DESCRIPTORS = 60  # of a stage that serves: libraries, links, files
MANY = 400


def descriptors(site: StageSite, box: str) -> int:
    return psutil.Process(site.processes[box].pid).num_fds()


@contextmanager
def strangers(port: int, count: int, context: ssl.SSLContext | None = None) -> Iterator[None]:
    """Connections that say nothing; with a context, nothing but their TLS handshake."""
    with ExitStack() as stack:
        for _ in range(count):
            with suppress(OSError):  # given up by the other side already
                raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                if context is not None:
                    stack.enter_context(context.wrap_socket(raw, server_hostname="localhost"))
        yield


@pytest.mark.parametrize(
    ("port", "tls", "allowed"),
    [
        ("metrics", False, HANDSHAKES_AT_ONCE),
        ("metrics", True, CONNECTIONS_AT_ONCE),
        ("ring", False, HANDSHAKES_AT_ONCE),
    ],
)
async def test_strangers_take_only_so_many_descriptors(untied: Served, port: str, tls: bool, allowed: int) -> None:
    site = untied.site
    number = (site.metrics_ports if port == "metrics" else site.ring_ports)["box1"]
    anonymous = ssl.create_default_context(cafile=str(site.ca.path)) if tls else None
    flood = strangers(number, MANY, anonymous)
    async with connected(site.client()):
        await asyncio.to_thread(flood.__enter__)
        try:
            await eventually(
                lambda: descriptors(site, "box1") <= allowed + OWN_DESCRIPTORS, lambda: descriptors(site, "box1")
            )
            operator = site.ca.issue("operator").client_context()
            assert (await get(site, "box1", "/health", operator))[0] == 200
            async with connected(site.client()) as client:  # a new link still gets through
                assert (await answer(client, request([5, 6], 8)))[0] == untied.model.greedy([5, 6], 8)
        finally:
            await asyncio.to_thread(flood.__exit__, None, None, None)
    await eventually(lambda: descriptors(site, "box1") <= OWN_DESCRIPTORS, lambda: descriptors(site, "box1"))


async def linked(site: StageSite, box: str, certificate: str, role: str, epoch: int) -> Link:
    """A link to a box, with a certificate of the site."""
    hello = Hello(PROTOCOL, role, certificate, "lab", site.model_digest, "exact", epoch, "t", {"ring": "x"})
    settings = LinkSettings(hello, site.ca.issue(certificate), LinkTiming())
    return await dial(settings, BoxAddress(box, "127.0.0.1", site.ring_ports[box]))


@pytest.mark.parametrize("role", ["stage", "gateway"])
async def test_a_box_has_only_so_many_links(untied: Served, role: str) -> None:
    site = untied.site
    async with connected(site.client()) as client:
        links = [await linked(site, "box1", "box9", role, 1000 + number) for number in range(LINKS_OF_A_BOX + 40)]
        await eventually(
            lambda: descriptors(site, "box1") <= LINKS_OF_A_BOX + OWN_DESCRIPTORS, lambda: descriptors(site, "box1")
        )
        assert (await answer(client, request([5, 6], 8)))[0] == untied.model.greedy([5, 6], 8)
        for link in links:
            link.close("done")


@pytest.mark.parametrize(("certificate", "reason"), [("control", "the predecessor is"), ("box3", "the predecessor is")])
async def test_a_certificate_of_the_site_is_no_predecessor(untied: Served, certificate: str, reason: str) -> None:
    with pytest.raises(LinkError, match=reason):
        await linked(untied.site, "box2", certificate, "stage", 1)


async def test_floods_of_a_gateway_keep_nobody_from_an_answer(untied: Served) -> None:
    """One that never reads cancels sequences that are not there, and wants more than anyone can serve."""
    site = untied.site
    bad = await linked(site, "box1", "control", "gateway", 1)
    with suppress(LinkError):  # it may be given up before it is done
        for number in range(3000):
            await bad.send(Frame(FrameType.CANCEL, encode_control(Cancel(number)), 1))
        for number in range(300):
            wanted = request([5, 6, 7], 200)
            await bad.send(Frame(FrameType.GENERATE, encode_control(wanted), 1))
            if number % 3 == 0:  # the same again
                await bad.send(Frame(FrameType.GENERATE, encode_control(wanted), 1))
    async with connected(site.client()) as client:
        bad.close("done")
        await eventually(lambda: client.status.queued_sequences == 0)
        assert (await answer(client, request([5, 6], 8)))[0] == untied.model.greedy([5, 6], 8)
    await site.wait_kv_empty()


async def test_floods_on_the_ring_port_of_a_wrong_epoch_end_their_link(untied: Served) -> None:
    """A neighbour's certificate, an epoch that nobody prepares: its frames wait for nobody."""
    site = untied.site
    async with connected(site.client()) as client:
        bad = await linked(site, "box2", "box1", "stage", 77)
        with pytest.raises(LinkError):
            for _ in range(100_000):
                await bad.send(Frame(FrameType.SURVEY, encode_control(KvLengths(())) + bytes(60_000), 77))
        assert (await answer(client, request([5, 6], 8)))[0] == untied.model.greedy([5, 6], 8)
    assert psutil.Process(site.processes["box2"].pid).memory_info().rss < 2**30
