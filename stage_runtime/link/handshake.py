"""Who may talk to whom: both sides say Hello, and either may refuse with both values in the reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from stage_runtime.link.connection import Link, LinkError, LinkTiming
from stage_runtime.link.control import Refused, decode_control, encode_control
from stage_runtime.link.frames import Frame, FrameError, FrameType, encode_frame, read_frame
from stage_runtime.link.messages import Hello
from stage_runtime.link.tasks import within
from stage_runtime.link.tls import PeerIdentity, peer_identity

log = logging.getLogger(__name__)

# A reason quotes what the peer said, which may be as long as a frame; the answer must fit one too.
REASON_CHARACTERS = 2000


def hello_problem(own: Hello, peer: Hello, identity: PeerIdentity | None) -> str:
    """Why a peer's Hello is refused; empty if it is welcome.

    Epochs are the business of whoever serves them. A coordinator serves every model, so model and policy count
    between the others only.

    Args:
        own: this side's Hello.
        peer: the other side's Hello.
        identity: what its verified certificate says.
    """
    if identity is None:
        return f"{peer.box} shows no certificate"
    for field, told, shown in (("CN", peer.box, identity.box), ("O", peer.site, identity.site)):
        if told != shown:
            return f"hello says {told!r}, the certificate's {field} is {shown!r}"
    of_the_model = () if "coordinator" in (own.role, peer.role) else ("model_digest", "policy")
    for field in ("site", "protocol", *of_the_model):
        mine, theirs = getattr(own, field), getattr(peer, field)
        if mine != theirs:
            return (
                f"{field.replace('_', ' ')} differs: {own.box} has {mine!r}, {peer.box} has {theirs!r} "
                f"(runtime {own.runtime_version} and {peer.runtime_version})"
            )
    return ""


HelloCheck = Callable[[Hello], str]


async def _read_hello(reader: asyncio.StreamReader) -> Hello:
    frame = await read_frame(reader)
    if frame.type is FrameType.REFUSED:
        raise LinkError(f"refused by the peer: {decode_control(Refused, frame.body).reason}", "refused")
    if frame.type is not FrameType.HELLO:
        raise LinkError(f"{frame.type.name} instead of a hello")
    return decode_control(Hello, frame.body)


def _hello_bytes(hello: Hello) -> bytes:
    return encode_frame(Frame(FrameType.HELLO, encode_control(hello), hello.epoch))


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: Hello, check: HelloCheck, *, dialled: bool
) -> tuple[Hello, str]:
    """The peer's Hello, and why it is refused (empty if it is not)."""
    if dialled:
        writer.write(_hello_bytes(own))
    peer = await _read_hello(reader)
    problem = hello_problem(own, peer, peer_identity(writer.get_extra_info("ssl_object"))) or check(peer)
    if not dialled and not problem:  # the link belongs to the epoch that the dialler named
        writer.write(_hello_bytes(replace(own, epoch=peer.epoch)))
    await writer.drain()
    return peer, problem[:REASON_CHARACTERS]


async def _refuse(writer: asyncio.StreamWriter, own: Hello, problem: str, timing: LinkTiming) -> None:
    """Say why, and end the connection: politely, so that the reason arrives, but for no longer than a handshake."""
    try:
        writer.write(encode_frame(Frame(FrameType.REFUSED, encode_control(Refused(problem)), own.epoch)))
        if not writer.is_closing():  # the peer has gone: closing twice would take the transport apart (Python 3.11)
            writer.close()
        await within(timing.handshake_seconds, writer.wait_closed())
    except (OSError, asyncio.TimeoutError) as error:
        log.debug("a refused peer did not close: %r", error)
    finally:
        writer.transport.abort()


async def shake_hands(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    own: Hello,
    check: HelloCheck,
    timing: LinkTiming,
    *,
    dialled: bool,
) -> Link:
    """Exchange Hellos; the side that dialled speaks first.

    Raises:
        LinkError: refused by either side, no Hello in time, or bytes that are no frame. The connection is closed.
    """
    try:
        peer, problem = await within(timing.handshake_seconds, _exchange(reader, writer, own, check, dialled=dialled))
    except asyncio.TimeoutError:
        writer.transport.abort()
        raise LinkError(f"no hello within {timing.handshake_seconds:g} s") from None
    except (FrameError, EOFError, OSError) as error:
        writer.transport.abort()
        raise LinkError(f"handshake: {error or type(error).__name__}") from None
    except (LinkError, asyncio.CancelledError):
        writer.transport.abort()
        raise
    if problem:
        await _refuse(writer, own, problem, timing)
        raise LinkError(f"refused {peer.box}: {problem}", "refused")
    return Link(reader, writer, peer, timing)
