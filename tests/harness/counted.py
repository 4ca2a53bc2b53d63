"""Counts what is read of the tensors in files."""

import contextlib

from safetensors import safe_open

from asyncrl.training import tensor_files


class Counted:
    """A file of tensors that adds up how many numbers are read from it."""

    read = 0

    def __init__(self, *given, **options):
        self._opened = safe_open(*given, **options)

    def __enter__(self):
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *given):
        return self._opened.__exit__(*given)

    def keys(self):
        return self._file.keys()

    def get_tensor(self, name):
        return Counted.counted(self._file.get_tensor(name))

    def get_slice(self, name):
        found = self._file.get_slice(name)

        class Slice:
            get_shape, get_dtype = found.get_shape, found.get_dtype

            def __getitem__(self, place):
                return Counted.counted(found[place])

        return Slice()

    @staticmethod
    def counted(tensor):
        Counted.read += tensor.numel()
        return tensor


@contextlib.contextmanager
def counted_reads():
    """Count in `read` of what is given, as long as the block lasts."""
    Counted.read, tensor_files.safe_open = 0, Counted
    try:
        yield Counted
    finally:
        tensor_files.safe_open = safe_open
