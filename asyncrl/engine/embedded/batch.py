"""The running requests: always slots 0..n-1 of the model."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.engine.embedded.budget import BLOCK
from asyncrl.engine.embedded.model import SPAN_ROWS, Model
from asyncrl.engine.embedded.request import Request
from asyncrl.engine.embedded.sampling import GREEDY, PLAIN, TRUNCATED, Rows


class Batch:
    """The running requests by row, with the fed and sampled tokens of each row."""

    def __init__(self, model: Model, rows: int) -> None:
        self.requests: list[Request] = []
        self.rows = Rows(rows)
        self._model = model

    def add(self, request: Request) -> None:
        """Append a request, whose row is the next one."""
        sampling, vocab = request.sampling, self._model.config.vocab_size
        cut = sampling.top_p < 1.0 or sampling.min_p > 0.0 or 0 <= sampling.top_k < vocab
        greedy = sampling.temperature == 0.0 or sampling.top_k == 1
        self.rows.records[request.row] = (
            (request.prompt + request.tokens)[request.known],
            request.known,
            request.seed,
            GREEDY if greedy else TRUNCATED if cut else PLAIN,
            sampling.temperature or 1.0,
            sampling.top_p,
            sampling.top_k if sampling.top_k > 0 else vocab,
            sampling.min_p,
        )
        self.requests.append(request)

    def feed(self, filling: Sequence[Request]) -> None:
        """Let rows whose prompts are not computed to their end feed the next token of them."""
        for request in filling:
            record = self.rows.records[request.row]
            record["token"] = (request.prompt + request.tokens)[request.known]
            record["position"] = request.known

    def held_tokens(self, filling: Sequence[Request]) -> int:
        """Tokens, in whole blocks, that the rows hold once each can feed its newest token.

        Args:
            filling: the running requests whose prompts are not computed to their end.
        """
        positions = self.rows.records["position"][: len(self.requests)].copy()
        for request in filling:
            positions[request.row] += request.open_tokens
        return int((positions // BLOCK + 1).sum()) * BLOCK

    def remove(self, request: Request) -> None:
        """Close the hole of a request. Each span gives its longest row to the one before it: rows stay sorted."""
        positions, count, row = self.rows.records["position"], len(self.requests), request.row
        written = int(positions[row])
        for start in range((row // SPAN_ROWS + 1) * SPAN_ROWS, count, SPAN_ROWS):
            donor = start + int(positions[start : min(start + SPAN_ROWS, count)].argmax())
            written = self._move(donor, row, written)
            row = donor
        if row != count - 1:
            written = self._move(count - 1, row, written)
        self._model.free(count - 1, 0, written)
        self.requests.pop()
        request.row = -1

    def _move(self, source: int, target: int, written: int) -> int:
        """Move a row to one that held `written` tokens, and return how many it holds itself."""
        held = int(self.rows.records["position"][source])
        self._model.copy_slot(source, target, held)
        self._model.free(target, held, written)
        self.rows.records[target] = self.rows.records[source]
        self.requests[target] = self.requests[source]
        self.requests[target].row = target
        return held
