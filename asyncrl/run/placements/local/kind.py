"""The kind of placement on this machine."""

from asyncrl.config.process_settings import PlacementKind

KIND = PlacementKind("asyncrl.run.placements.local.processes:open_placement", one_machine=True)
