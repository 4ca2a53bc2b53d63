"""The first use of a card: by a rank, or to look whether one that was missing works.

`python -m actors.learner.card DEVICE` uses a card and ends; what is wrong with it is printed.
"""

from __future__ import annotations

import sys

from actors.learner.rank import Call, Rank
from asyncrl.training.ranks import CardFull, NoCard, take_card


class TakeCard(Call[None]):
    """Take the card, before anything waits for another rank.

    Raises:
        NoCard, CardFull: it cannot be used.
    """

    on_card = True

    def _compute(self, rank: Rank) -> None:
        rank.take_card()


def main() -> None:
    """Use the card."""
    try:
        take_card(sys.argv[1], rank=0, ranks=1)
    except (NoCard, CardFull) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
