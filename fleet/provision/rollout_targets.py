"""Where a provisioning run asks how the site is: the gateway's and the coordinator's HTTPS."""

from __future__ import annotations

from fleet.inventory.model import Role
from fleet.inventory.sitefile import SiteFile
from fleet.provision.pki import ca_certificate_path, operator_paths
from fleet.provision.ports import gateway_box
from fleet.provision.render import RenderInputs
from fleet.provision.render_layout import server_name
from fleet.provision.rollout_gate import HealthTarget
from fleet.provision.rollout_state import client_key


def gateway_target(inputs: RenderInputs) -> HealthTarget | None:
    """The gateway's `/health`; None for a site without one, or whose API key is not made yet."""
    site_file = inputs.site_file
    box, key = gateway_box(site_file), client_key(site_file, create=False)
    if box is None or key is None:
        return None
    return _target(site_file, box, inputs.ports[box].gateway, key)


def coordinator_target(inputs: RenderInputs) -> HealthTarget | None:
    """The coordinator's `/v1/site`, which takes the operator's certificate and no API key; None for a site without."""
    boxes = inputs.site_file.boxes_with(Role.COORDINATOR)
    return _target(inputs.site_file, boxes[0], inputs.ports[boxes[0]].coordinator_http, "") if boxes else None


def _target(site_file: SiteFile, box: str, port: int, api_key: str) -> HealthTarget:
    key, certificate = operator_paths(site_file.state_directory)
    return HealthTarget(
        host=site_file.site.boxes[box].address,
        port=port,
        server_name=server_name(site_file.site.site, box),
        ca=ca_certificate_path(site_file.state_directory),
        certificate=certificate,
        key=key,
        api_key=api_key,
    )
