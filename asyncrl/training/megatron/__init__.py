"""A trainer on megatron-core: models whose layers and products are spread over ranks."""

import warnings

# It says so at its import, and it is meant: Transformer Engine and Apex are absent.
warnings.filterwarnings("ignore", module=r"megatron\.core")
