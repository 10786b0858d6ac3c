"""The gateway's process: its listeners, its links to the pipelines, its end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping

from aiohttp import web

from fleet.errors import FleetError
from fleet.gateway.admission import AdmissionQueue
from fleet.gateway.answering import Answering
from fleet.gateway.app import Gateway
from fleet.gateway.auth import load_api_keys
from fleet.gateway.backend import Backend
from fleet.gateway.config import GatewayConfig
from fleet.gateway.healing import HealingPipeline
from fleet.gateway.journal import Journal
from fleet.gateway.links import make_channel
from fleet.gateway.log import logger
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.streams import StreamRegistry
from fleet.gateway.vocabulary import Vocabulary
from stage_runtime.link.https import BusyConnections, HttpsListener

SHUTDOWN_SECONDS = 5.0
"""Open answers may finish so long after SIGTERM; supervisord waits longer (`drain_seconds` + 5) before it kills."""
KEEPALIVE_SECONDS = 75.0
"""An idle client connection is closed after it."""
CONNECTIONS_AT_ONCE = 512
"""Of clients over HTTPS; for one more the oldest idle one goes, and itself if each of these is an open answer."""


def make_gateway(config: GatewayConfig, pipelines: Mapping[str, HealingPipeline], metrics: GatewayMetrics) -> Gateway:
    """Read keys, tokenizers and templates; CPU-bound and blocking, before the loop serves.

    Args:
        config: what the gateway was told.
        pipelines: by name, one for each of `config.pipelines`.
        metrics: the gateway's series.

    Raises:
        FleetError: a file is missing or wrong.
    """
    vocabularies = {path: Vocabulary(path) for path in {each.model_directory for each in config.pipelines}}
    backends = [
        Backend(
            config=each,
            pipeline=pipelines[each.name],
            vocabulary=vocabularies[each.model_directory],
            queue=AdmissionQueue(each.max_sequences, config.max_queued_requests),
        )
        for each in config.pipelines
    ]
    journal = Journal(config.journal_directory, metrics.journal_failures.inc)
    registry = StreamRegistry(journal, config.resume_max_streams, metrics)
    return Gateway(
        config=config,
        keys=load_api_keys(config.api_keys_file),
        backends=backends,
        metrics=metrics,
        answering=Answering(config, backends, metrics, registry),
        channel=make_channel(config, pipelines),
        registry=registry,
        journal=journal,
        started=int(time.time()),
    )


async def start_listening(gateway: Gateway) -> HttpsListener:
    """Open the listeners; the caller closes what it gets, which closes the one on loopback too.

    Raises:
        FleetError: an address can't be listened on, or the certificate can't be read.
    """
    config = gateway.config
    try:
        # clients show API keys; a certificate of the site's CA is looked at if one is shown (scrape, status)
        context = config.tls.server_context(require_certificate=False)
    except OSError as error:
        raise FleetError(
            f"{config.tls.certificate}: cannot use this certificate: {error}", hint="run fleet provision again"
        ) from None
    busy = BusyConnections()
    runner = web.AppRunner(
        gateway.application(busy.note),
        handler_cancellation=True,  # a client that goes away cancels its sequences
        access_log=None,  # the middleware logs
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=KEEPALIVE_SECONDS,
    )
    await runner.setup()
    listener, where = HttpsListener(runner, context, most=CONNECTIONS_AT_ONCE, busy=busy), config.listen
    try:
        listener.start(where.host, where.port)
        if config.loopback is not None:
            where = config.loopback
            await web.TCPSite(runner, where.host, where.port).start()
    except OSError as error:
        await listener.close()
        raise FleetError(
            f"cannot listen on {where.host}:{where.port}: {error.strerror}",
            hint=f"see who has the port: ss -ltnp 'sport = :{where.port}'",
        ) from None
    return listener


async def serve(gateway: Gateway) -> None:
    """Serve until SIGTERM or SIGINT, or until a part of it ends, which it only does by a bug.

    Raises:
        FleetError: an address can't be listened on.
        Exception: what ended that part.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    gateway.recover()
    listener = await start_listening(gateway)
    logger.info("listening", extra={"fields": {"host": gateway.config.listen.host, "port": gateway.config.listen.port}})
    running = loop.create_task(gateway.run())
    stopping = loop.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopping, running], return_when=asyncio.FIRST_COMPLETED)
        if running in done:
            running.result()  # raises the bug; supervisord starts us anew
    finally:
        await listener.close()
        for task in (stopping, running):
            task.cancel()
        await asyncio.gather(stopping, running, return_exceptions=True)
    logger.info("stopped")
