"""Links of the gateway: to the coordinator, and to the first stage of each pipeline's epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleet import __version__
from fleet.gateway.channel import RouteChannel
from fleet.gateway.config import GatewayConfig, PipelineConfig
from fleet.gateway.healing import HealingPipeline, HealingTiming, Observer
from fleet.gateway.routes import RouteStore
from stage_runtime.link.client import PipelineClient
from stage_runtime.link.control import PROTOCOL
from stage_runtime.link.endpoints import BoxAddress, LinkSettings
from stage_runtime.link.membership import Route
from stage_runtime.link.messages import Hello, Pipeline


def make_pipelines(config: GatewayConfig, observer: Observer) -> dict[str, HealingPipeline]:
    """The pipelines, by name; nothing is dialled before their `run()`, nor before they have a route."""
    timing = HealingTiming(replan_wait=config.replan_wait_seconds)
    return {
        each.name: HealingPipeline(each.name, each.policy, _connector(config, each), timing, observer)
        for each in config.pipelines
    }


def make_channel(config: GatewayConfig, pipelines: Mapping[str, HealingPipeline]) -> RouteChannel:
    """The link to the coordinator. Its hello names no model and no policy: one channel is for all pipelines."""
    hello = Hello(PROTOCOL, "gateway", config.box, config.site, "", "", 0, __version__)
    coordinator = config.coordinator
    return RouteChannel(
        LinkSettings(hello, config.tls, config.timing),
        BoxAddress(coordinator.box, coordinator.address.host, coordinator.address.port),
        pipelines,
        RouteStore(config.journal_directory),
    )


def _connector(config: GatewayConfig, pipeline: PipelineConfig) -> Callable[[Route, Callable[[], None]], Pipeline]:
    def connect(route: Route, changed: Callable[[], None]) -> Pipeline:
        return PipelineClient(
            site=config.site,
            box=config.box,
            first_stage_box=route.first_stage,
            host=route.host,
            port=route.port,
            model_digest=pipeline.model_digest,
            policy=pipeline.policy,
            epoch=route.epoch,
            runtime_version=__version__,
            tls=config.tls,
            timing=config.timing,
            changed=changed,
        )

    return connect
