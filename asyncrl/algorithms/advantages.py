"""From rewards to advantages."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

AdvantageKind: TypeAlias = Literal["grpo", "centered", "none"]

_STD_FLOOR = 1e-6


def group_advantages(rewards: npt.ArrayLike, *, kind: AdvantageKind) -> npt.NDArray[np.float64]:
    """Advantages of the trajectories of one prompt.

    Args:
        rewards: [G] one per graded trajectory of the prompt.
        kind: `grpo` centers on the group mean and divides by the unbiased standard deviation + 1e-6;
            `centered` only centers; `none` takes the rewards as they are.

    Returns:
        [G]; zeros where a baseline cannot tell the members apart (one member, or all rewards equal).

    Raises:
        ValueError: when a reward is not finite.

    Source: GRPO, arXiv 2402.03300, section 4.1.2; `centered` is Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards {values.tolist()} of one group; every reward must be a finite number")
    if kind == "none":
        return values
    # Equality is tested on the rewards: the mean of equal floats may differ from them by a rounding error,
    # which a division by a vanishing deviation would blow up into an advantage.
    if values.size < 2 or (values == values[0]).all():
        return np.zeros_like(values)
    centered: npt.NDArray[np.float64] = values - values.mean()
    return centered if kind == "centered" else centered / (values.std(ddof=1) + _STD_FLOOR)
