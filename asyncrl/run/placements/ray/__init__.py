"""Placement on the hosts of a Ray cluster."""

from asyncrl.config.process_settings import PlacementKind

KIND = PlacementKind(
    "asyncrl.run.placements.ray.placement:RayPlacement",
    check="asyncrl.run.placements.ray.preflight:check_cluster",
    node_killer="asyncrl.run.placements.ray.node_killer:NodeKiller",
)
