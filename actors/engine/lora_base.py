"""The model that the host of an engine adds adapters to."""

from __future__ import annotations

from pathlib import Path

from asyncrl.weights.adapters import digest_of_model
from asyncrl.weights.verify import TornVersion


class Adapting:
    """The directory of the run's model on this host, and who adds adapters to it."""

    def __init__(self, model: Path, *, merges: bool) -> None:
        """
        Args:
            model: the directory.
            merges: whether this actor does, since the server only takes whole models.
        """
        self.merges = merges
        self._model = model
        self._known: tuple[object, str] = (None, "")  # state of the model's files, and their digest

    def check(self, digest: str) -> None:
        """Refuse an adapter that was made for another model than the local one; the model is read once, and again after
        a change.

        Raises:
            TornVersion: it is another one, or cannot be read.
        """
        files = sorted(self._model.glob("*.safetensors"))
        try:
            # A copy that keeps times changes these, too.
            state = [(file.name, (of := file.stat()).st_size, of.st_ino, of.st_ctime_ns) for file in files]
            if self._known[0] != state:
                self._known = (state, digest_of_model(self._model))
        except (OSError, ValueError) as error:
            raise TornVersion(
                f"the model {self._model}, which the adapter is added to, cannot be read: {error}"
            ) from error
        if self._known[1] != digest:
            raise TornVersion(
                f"it is an adapter of the model with digest {digest}; {self._model} on this host has digest "
                f"{self._known[1] if files else 'none: no *.safetensors are there'}; put the run's model there"
            )

    def write(self, adapter: Path, target: Path) -> None:
        """Fill a directory with the model and an adapter in it.

        Raises:
            TornVersion: the adapter cannot be read, or does not fit.
            OSError: the disk refused it.
        """
        from asyncrl.weights.merging import write_merged  # loads torch, which most engine actors do without

        write_merged(self._model, adapter, target)
