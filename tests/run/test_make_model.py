import pytest

from asyncrl.config.settings import Config
from asyncrl.errors import LaunchError
from asyncrl.run.launch import make_model


async def test_a_model_that_cannot_be_made_ends_the_start_and_says_why(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes").touch()
    with pytest.raises(LaunchError, match=r"the model could not be made: .*model is not empty"):
        await make_model(tmp_path / "model", Config())
