"""Links from the gateway to the first stage of each pipeline."""

from __future__ import annotations

from fleet import __version__
from fleet.errors import ExitCode, FleetError
from fleet.gateway.config import GatewayConfig
from stage_runtime.link.client import PipelineClient
from stage_runtime.link.connection import LinkTiming
from stage_runtime.link.messages import Pipeline


def make_pipelines(config: GatewayConfig) -> dict[str, Pipeline]:
    """A client for each pipeline, by name; nothing is dialled before its `run()`.

    Raises:
        FleetError: a ring_* field of the timing is missing.
    """
    try:
        timing = LinkTiming.from_config(config.timing)
    except KeyError as error:
        raise FleetError(
            f"gateway.json: timing: field {error} is missing",
            hint="write the configuration anew: fleet provision",
            exit_code=ExitCode.INVALID_INVENTORY,
        ) from None
    return {
        each.name: PipelineClient(
            site=config.site,
            box=config.box,
            first_stage_box=each.first_stage,
            host=each.address.host,
            port=each.address.port,
            model_digest=each.model_digest,
            policy=each.policy,
            epoch=each.epoch,
            runtime_version=__version__,
            tls=config.tls,
            timing=timing,
        )
        for each in config.pipelines
    }
