"""A trainer on megatron-core: models whose layers and products are spread over ranks."""

import sys
import warnings

# It says so at its import, and it is meant: Transformer Engine and Apex are absent.
warnings.filterwarnings("ignore", module=r"megatron\.core")

# Where Transformer Engine is installed the library would take optimiser, norms and generators from there: other bits,
# and checkpoints of another form. It is hidden from the library; `products.py` finds it for products in FP8.
TRANSFORMER_ENGINE = "transformer_engine"
sys.modules.setdefault(TRANSFORMER_ENGINE, None)  # type: ignore[arg-type]
